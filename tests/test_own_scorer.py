"""The package that docs/scorers.md shows: installed as written there, loaded and served with."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tangram_sglang.errors import TangramError
from tangram_sglang.score import SCORERS, create_scorer
from tests.harness import Req
from tests.reference import CompressedRun, layout_for, scorers
from tests.reference.tiny import random_tokens, save, tiny_llama
from tests.serving import TINY_ENV, assert_same_kept, serve

pytestmark = pytest.mark.server

DOCS = Path(__file__).resolve().parents[1] / "docs" / "scorers.md"


def attended_values(k, v, start, sinks, head, stats, asked):
    """What the example computes, query by query."""
    size, total = len(k), torch.zeros(len(k), dtype=torch.float64)
    for q in asked.q.double():
        for t in range(size - 16, size):
            total[: t + 1] += (k[: t + 1].double() @ q[t] * asked.scaling).softmax(dim=0)
    return (total / len(asked.q) / 16 * v.double().norm(dim=1)).float()


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The example on the path of this process and of schedulers that it forks."""
    source, target = tmp_path / "source", tmp_path / "installed"
    source.mkdir()
    blocks = re.findall(r"```\w+\n# (\S+)\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert [name for name, _ in blocks] == ["attended_values.py", "pyproject.toml"]
    for name, text in blocks:
        (source / name).write_text(text)
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--target", str(target), str(source)], check=True)
    monkeypatch.syspath_prepend(str(target))


def test_the_package_of_the_docs_is_found_and_serves(installed, tmp_path, monkeypatch):
    torch.set_num_threads(1)
    assert "attended_values" not in SCORERS
    assert type(create_scorer("attended_values")).__name__ == "AttendedValues"
    with pytest.raises(TangramError, match=r"unknown scorer 'best'; known: attended_values, exp"):
        create_scorer("best")
    model = tiny_llama(seed=8, q_heads=6, kv_heads=3)
    folder = save(model, tmp_path / "model")
    env = {**TINY_ENV, "TANGRAM_RETENTION": "0.4", "TANGRAM_SCORER": "attended_values"}
    prompt = random_tokens(150, seed=3)
    result = serve(folder, [Req(prompt, 40, rid="a")], env=env, chunked_prefill_size=50)
    monkeypatch.setitem(scorers.SCORERS, "attended_values", attended_values)
    layout = layout_for(model, retention=0.4, window=32, recent=16, page=4)
    reference = CompressedRun(model, layout, "attended_values")
    assert result["a"].output_ids == reference.greedy(prompt, 40)
    kept = {key: p for key, p in reference.kept.items() if key[2] < layout.rule.sealed(189)}
    assert_same_kept(result.collected["kept"]["a"], kept)


def test_the_docs_list_every_scorer_with_its_needs():
    listed = {}
    for line in DOCS.read_text().splitlines():
        cells = re.split(r"(?<!\\)\|", line)
        if len(cells) == 6:
            listed[cells[1].strip(" `")] = set(re.findall(r"`(\w+)`", cells[3]))
    known = {name: set(create_scorer(name).needs) for name in SCORERS}
    assert {name: listed.get(name) for name in known} == known
