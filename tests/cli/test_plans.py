"""`tangram inspect` and `tangram plan` on a shipped plan: figures that follow from the layout."""

import re
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest
from msgspec.structs import replace

from tangram_sglang.cli import main, plan
from tangram_sglang.cli.inspect import bar, layout_of
from tangram_sglang.plan.file import load_plan, save_plan

PLAN = Path(str(resources.files("tangram_sglang") / "plans" / "smollm2-135m-instruct-rho0.3.json"))


def printed(capsys, *argv):
    assert main([*map(str, argv)]) == 0
    return capsys.readouterr().out


def test_inspect_shows_what_a_server_would_hold(capsys):
    out = printed(capsys, "inspect", PLAN, "--tokens", 4096)
    assert "SmolLM2-135M-Instruct" in out and "expected_attention" in out
    assert len(re.findall(r"^layer ", out, re.M)) == 30
    groups = re.findall(r"group +(\d+)  K +(\d+) .* {2}((?:\d+\.\d ?)+)$", out, re.M)
    assert len(groups) == 23
    heads = [name for *_, names in groups for name in names.split()]
    assert sorted(heads) == sorted(f"{layer}.{h}" for layer in range(30) for h in range(3))
    # pages of 4 heads, K and V, 16 tokens of 64 numbers of 2 bytes
    pages = int(re.search(r"(\d+) pages", out)[1])
    held = int(re.search(r"held +([\d,]+) bytes", out)[1].replace(",", ""))
    assert held == pages * 4 * 2 * 16 * 64 * 2
    kept = sum(int(k) for _, k, _ in groups)
    assert pages == 7 * kept // 16 + 23 * (4096 - 7 * 512) // 16
    assert f"{held / (4096 * 90 * 2 * 64 * 2):.4f}" in out


def test_inspect_takes_another_retention_and_grouping(capsys):
    out = printed(capsys, "inspect", PLAN, "--retention", 0.5, "--group-heads", 1)
    assert len(re.findall(r"group +\d+ ", out)) == 90
    assert "0.5000 of the bytes held" in out


def test_inspect_counts_the_pages_of_what_the_scorer_reads(tmp_path, capsys):
    """Queries of one window; gate scores of every raw token, beside 23 pages of K and V."""
    raw = load_plan(PLAN)
    held = {}
    for scorer in ("keydiff", "snapkv", "fastkvzip"):
        picked = replace(raw.selection, scorer=scorer)
        if scorer == "fastkvzip":
            picked = replace(picked, gates_file="its-gates.safetensors", gates_hash="0" * 64)
        save_plan(replace(raw, selection=picked), tmp_path / "plan.json")
        out = printed(capsys, "inspect", tmp_path / "plan.json", "--tokens", 4096)
        held[scorer] = int(re.search(r"(\d+) pages", out)[1])
        assert len(re.findall(r"^  group ", out, re.M)) == 23
    # 30 layers of 9 query heads, 32 queries each, 128 vectors a page
    assert held["snapkv"] - held["keydiff"] == -(-30 * 9 * 32 // 128)
    assert held["fastkvzip"] - held["keydiff"] == (4096 - 7 * 512) // 16
    assert "fastkvzip" in out and "its-gates.safetensors" in out


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "|    |"), (1, "|████|"), (0.5, "|██  |"), (0.28, "|█▏  |"), (7, "|████|")],
)
def test_bars_are_true_to_an_eighth_of_a_character(share, text):
    assert bar(share, 4) == text


def test_plan_shares_out_the_programs_of_a_gpu(capsys):
    out = printed(capsys, "plan", PLAN, "--programs", 264, "--batch", "1,8")
    assert "N_CTA 264 programs" in out
    for batch in (1, 8):
        part = out.split(f"batch {batch}\n")[1].split("batch")[0]
        lines = re.findall(r"layer +\d+ +([\d ]+) all +(\d+) +([\d.]+)", part)
        assert len(lines) == 30
        for splits, grid, balance in lines:
            assert batch * sum(map(int, splits.split())) == int(grid)
            # each head has at least one program, so a thin one may take a little less than its share
            assert abs(int(grid) - 264) <= 3 * batch
            # at 33 programs for three heads, halves that are rounded weigh more
            assert 1.0 <= float(balance) < (1.15 if batch == 1 else 1.5)
        means = re.search(r"([\d.]+) on average, .* splits ([\d.]+) and", part.replace("\n", " "))
        assert float(means[1]) < 1.2 < float(means[2])
    assert "with equal splits" in out


def test_plan_shares_are_the_kept_tokens():
    arguments = type(
        "A", (), {"plan": PLAN, "retention": None, "group_heads": 4, "grouping": "global"}
    )
    found, layout = layout_of(arguments, 4096)
    shares = plan.head_shares(found, layout)
    assert shares.shape == (30, 3)
    assert shares[3, 0] == layout.groups[layout.place[3, 0][0]].kept


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        pytest.param(["inspect", "/no/plan"], "plan file /no/plan cannot be read", id="no plan"),
        pytest.param(["inspect", PLAN, "--tokens", 0], "expected at least 1", id="no tokens"),
        pytest.param(["inspect", PLAN, "--group-heads", 0], "GROUP_HEADS", id="no heads"),
        pytest.param(["plan", PLAN], "give --gpu to measure it", id="no programs"),
        pytest.param(["plan", PLAN, "--programs", 0], "expected at least 1", id="0 programs"),
        pytest.param(["plan", PLAN, "--programs", 9, "--gpu"], "not together", id="both"),
        pytest.param(["plan", PLAN, "--programs", 9, "--batch", 0], "--batch", id="batch 0"),
    ],
)
def test_mistakes_are_one_line(capsys, argv, message):
    assert main([*map(str, argv)]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_a_machine_without_a_gpu_is_told_what_to_give(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["plan", str(PLAN), "--gpu"]) == 2
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_gpu_says_how_many_programs_it_holds(capsys):
    out = printed(capsys, "plan", PLAN, "--gpu")
    assert int(re.search(r"N_CTA (\d+) programs", out)[1]) >= 16


def test_a_plan_whose_heads_do_not_fit_is_refused(tmp_path, capsys):
    raw = PLAN.read_text().replace('"num_attention_heads": 9', '"num_attention_heads": 8')
    from tangram_sglang.plan.file import config_hash

    config = load_plan(PLAN).model.config
    raw = raw.replace(config_hash(config), config_hash({**config, "num_attention_heads": 8}))
    path = tmp_path / "plan.json"
    path.write_text(raw)
    assert main(["inspect", str(path)]) == 2
    assert "expected a multiple of 3" in capsys.readouterr().err


def test_a_reader_that_has_enough_gets_no_traceback():
    command = "import sys; from tangram_sglang.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", command, "plan", str(PLAN), "--programs", "924"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        said = process.stderr.read()
        assert process.wait(120) == 1
    assert said == b""


def test_a_broken_pipe_that_is_not_our_output_is_no_quiet_end(monkeypatch):
    def run(arguments):
        raise BrokenPipeError("a server's")

    monkeypatch.setattr(plan, "run", run)
    with pytest.raises(BrokenPipeError, match="a server's"):
        main(["plan", str(PLAN), "--programs", "924"])
