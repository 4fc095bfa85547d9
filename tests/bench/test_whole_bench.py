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


def test_conversations_are_played_and_what_was_said_is_found_again(tmp_path):
    """Fleet, weights of the norms, SGLang's client, the gauge and the CSV file."""
    folder, out = tmp_path / "tiny", tmp_path / "x.csv"
    folder.mkdir()
    shape = json.loads((SHAPES / "llama-3.1-8b.json").read_text())
    (folder / "config.json").write_text(json.dumps(shape | TINY))
    save_word_tokenizer(TINY["vocab_size"], folder)
    command = [
        *(sys.executable, "-m", "bench.multi_turn", "--cpu", "--model", str(folder)),
        # one server, so no gate and no ratio; the pool is large enough for everything
        *("--baselines", "--retentions", "0.5", "--conversations", "3", "--turns", "3"),
        *("--scale", "0.01", "--answer", "2400", "--context-length", "2048", "--max-running", "8"),
        *("--settings", "WINDOW=64", "RECENT=32", "--csv", str(out), "--logs", str(tmp_path)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "BENCH_COMMIT": "this"}
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "gate: none" in ran.stdout
    with out.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["server"], row["case"], row["git"]) == ("tangram 0.5", "all turns", "this")
    assert (row["times_stock"], row["gate"], row["runs"]) == ("", "none", "1")
    assert row["command"].startswith("python -m bench.multi_turn --cpu")
    # a turn reuses whole pages of all that was said before, up to the last page or two
    prompts, new = [328 + k * (10 + 24) for k in range(3)], 10 + 24
    assert float(row["hit_rate"]) >= sum(x - new - 2 * 16 for x in prompts[1:]) / sum(prompts[1:])
    assert 1 <= float(row["peak_running"]) <= 3
    assert float(row["ttft_later_s"]) > 0
