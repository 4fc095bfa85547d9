"""A whole bench command against a server with dummy weights on this CPU."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.shapes import SHAPES
from bench.words import save_word_tokenizer

pytestmark = pytest.mark.server

ROOT = Path(__file__).resolve().parents[2]
TINY = {
    **{"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4096},
    **{"max_position_embeddings": 4096, "rope_scaling": None},
}


def test_a_suite_plays_conversations_and_times_decode_steps_on_the_same_server(tmp_path):
    """Fleet, weights of the norms, SGLang's clients, the gauge and the CSV files."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    shape = json.loads((SHAPES / "llama-3.1-8b.json").read_text())
    (folder / "config.json").write_text(json.dumps(shape | TINY))
    save_word_tokenizer(TINY["vocab_size"], folder)
    command = [
        *(sys.executable, "-m", "bench.suite", "--cpu", "--model", str(folder)),
        # one server, so no gate and no ratio; the pool is large enough for everything
        *("--baselines", "--retentions", "0.5", "--scale", "0.01", "--context-length", "2048"),
        *("--max-running", "8", "--settings", "WINDOW=64", "RECENT=32"),
        *("--results", str(tmp_path), "--logs", str(tmp_path)),
        "multi_turn --conversations 3 --turns 3 --answer 2400",
        "server_decode --batch-sizes 2 --output-len 800 --repeats 1",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "BENCH_COMMIT": "this"}
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.count("gate: none") == 2
    assert ran.stderr.count("ready after") == 1
    talk, decode = (row_of(tmp_path / f"{name}.csv") for name in ("multi_turn", "server_decode"))
    assert (talk["server"], talk["case"], talk["git"]) == ("tangram 0.5", "all turns", "this")
    assert (talk["times_stock"], talk["gate"], talk["runs"]) == ("", "none", "1")
    assert talk["command"].startswith("python -m bench.suite --cpu")
    assert talk["command"].endswith("'server_decode --batch-sizes 2 --output-len 800 --repeats 1'")
    # a turn reuses whole pages of all that was said before, up to the last page or two
    prompts, new = [328 + k * (10 + 24) for k in range(3)], 10 + 24
    assert float(talk["hit_rate"]) >= sum(x - new - 2 * 16 for x in prompts[1:]) / sum(prompts[1:])
    assert 1 <= float(talk["peak_running"]) <= 3
    assert float(talk["ttft_later_s"]) > 0
    assert (decode["case"], decode["input_len"], decode["output_len"]) == ("batch 2", "20", "8")
    assert (decode["over_best_stock"], decode["gate"]) == ("", "none")
    # eight steps, between the first token and the end
    whole_ms = 1e3 * (float(decode["latency_s"]) - float(decode["last_ttft_s"]))
    assert float(decode["step_ms"]) == pytest.approx(whole_ms / 8, rel=1e-2)


def row_of(path: Path) -> dict[str, str]:
    with path.open(newline="") as file:
        (row,) = csv.DictReader(file)
    return row
