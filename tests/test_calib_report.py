"""The report: what its tables say of made-up measurements, its files, and a page without matplotlib."""

import builtins
import csv
import re

import numpy as np
import pytest

from tangram_sglang.calib.calibrate import Recipe
from tangram_sglang.calib.moments import QueryMoments
from tangram_sglang.calib.observations import write_queries, write_window
from tangram_sglang.calib.profiles import Samples
from tangram_sglang.calib.report import write_report
from tangram_sglang.calib.report_stability import halves_table, kinds_table, samples_table
from tangram_sglang.calib.report_tables import (
    Case,
    clipped,
    clipping_table,
    grouping_table,
    memory_table,
    reclaimed,
    regularity_table,
    spearman,
)
from tangram_sglang.calib.run_folder import Run, RunFolder
from tangram_sglang.plan.shape import LayerShape, ModelShape
from tangram_sglang.plan.window import WindowRule

RULE = WindowRule(64, 16, 4, 4)
HEADS = tuple((layer, head) for layer in range(3) for head in range(2))
LEVELS = np.array([0.9, 0.1, 0.5, 0.3, 0.7, 0.5])


def samples_of(noise, texts=12, each=4, seed=0):
    """Shares near ``LEVELS``; texts of three kinds by turns."""
    rng = np.random.default_rng(seed)
    prompts = np.repeat(np.arange(texts), each)
    shares = np.clip(LEVELS + noise * rng.standard_normal((len(prompts), 6)), 0.01, 1)
    kinds = np.array(["prose", "code", "table"])[prompts % 3]
    return Samples("keydiff", shares, prompts, kinds, (), None)


def case(noise=0.02, **more):
    return Case(0.5, 2.0, HEADS, RULE, (samples_of(noise, **more),))


def test_spearman_is_that_of_the_textbook():
    assert spearman(np.array([1, 2, 3]), np.array([10, 20, 30])) == pytest.approx(1)
    assert spearman(np.array([1, 2, 3]), np.array([3, 2, 1])) == pytest.approx(-1)
    # ties share their mean rank: ranks 0, 1.5, 1.5, 3 and 0, 1, 2, 3
    assert spearman(np.array([1, 5, 5, 9]), np.array([1, 2, 3, 4])) == pytest.approx(
        4.5 / 22.5**0.5
    )
    assert spearman(np.ones(3), np.arange(3)) == 0


def test_regular_samples_are_called_regular():
    calm = [x["spearman"] for x in regularity_table([case(0.02)]).rows]
    wild = [x["spearman"] for x in regularity_table([case(0.5)]).rows]
    assert len(calm) == 48 and np.mean(calm) > 0.9 > np.mean(wild)
    (halves,) = halves_table([case(0.02)]).rows
    assert halves["splits"] == 20 and halves["mean"] > 0.95


def test_room_above_the_mean_clips_less_and_rescaling_takes_it_back():
    rows = {x["alpha"]: x for x in clipping_table([case(0.1)]).rows}
    assert rows[0.0]["clipped"] > 3 * rows[2.0]["clipped"]
    assert rows[0.0]["mean_budget"] < rows[1.0]["mean_budget"] < rows[2.0]["mean_budget"]
    assert rows[2.0]["clipped_rescaled"] > rows[2.0]["clipped"]
    assert clipped(np.array([0.5, 0.5]), np.array([0.25, 1.0])) == 0.25


def test_memory_is_asked_in_full_and_served_at_the_retention():
    rows = {x["alpha"]: x for x in memory_table([case(0.1)], 2, 4).rows}
    assert rows[2.0]["asked"] > rows[0.0]["asked"]
    assert rows[0.0]["asked"] == pytest.approx(0.5, abs=0.03)
    assert all(x["served"] <= 0.5 and x["served"] > 0.49 for x in rows.values())
    assert all(x["asked_in_pages"] >= x["asked"] for x in rows.values())


def test_pages_are_reclaimed_as_in_the_papers_toy():
    """Six heads in groups of 3 (paper 4.2.2): clustering frees what mixed groups hold."""
    budgets = np.array([1.0, 0.25, 0.25, 1.0, 1.0, 0.25])
    heads = tuple((0, h) for h in range(6))
    found = {
        x: reclaimed(heads, budgets, RULE, x, 3) for x in ("none", "adjacent", "across layers")
    }
    assert found == {"none": 0, "adjacent": 0, "across layers": pytest.approx(0.375)}
    assert reclaimed(heads, budgets, RULE, "adjacent", 1) == pytest.approx(0.375)
    two = tuple((layer, h) for layer in range(3) for h in range(2))
    assert reclaimed(two, budgets, RULE, "per layer", 2) == pytest.approx(0)
    # no layer has more than two heads to group
    assert reclaimed(two, budgets, RULE, "per layer", 16) == pytest.approx(0)
    # the padding of a last group is held
    assert reclaimed(heads, np.ones(6), RULE, "across layers", 4) == pytest.approx(-1 / 3)
    rows = grouping_table([case()]).rows
    assert len(rows) == 4 * 5


def test_kinds_that_differ_show_and_one_kind_alone_has_no_table():
    mixed = case(0.02)
    shares = mixed.profiles[0].data
    odd = mixed.profiles[0].kinds == "table"
    shares[odd] = shares[odd][:, ::-1]
    rows = {x["kind"]: x for x in kinds_table([mixed]).rows}
    assert rows["table"]["spearman"] < 0 < rows["code"]["spearman"]
    assert rows["table"]["clipped"] > rows["table"]["clipped_by_the_others_own"]
    mixed.profiles[0].kinds[:] = "prose"
    assert kinds_table([mixed]).rows == []


def test_more_samples_agree_better_with_all():
    rows = samples_table([case(0.2)]).rows
    assert [x["samples"] for x in rows] == [10, 25]
    assert rows[0]["spearman"] < rows[1]["spearman"]


@pytest.fixture
def folder(tmp_path):
    """A run of 4 texts, 3 windows each."""
    run = Run(
        "Tiny", "0", 64, 16, 4, ["keydiff"], "keydiff", [0.5], "0" * 64,
        [(kind, f"{kind}{i}") for i, kind in enumerate(("prose", "code", "prose", "code"))],
        [200] * 4,
    )  # fmt: skip
    folder = RunFolder.open(tmp_path / "o", run)
    layers = tuple(LayerShape(i, 2, 2, 8, None, 1.0) for i in range(3))
    rng = np.random.default_rng(1)
    folder.live.mkdir()
    for prompt in range(4):
        for i in range(3):
            shares = np.clip(LEVELS + 0.05 * rng.standard_normal((1, 6)), 0, 1)
            write_window(folder.live, i, 64 * i, {"keydiff.global": shares.astype(np.float32)})
        moments = [QueryMoments(2, 8) for _ in layers]
        write_queries(folder.live, ModelShape(layers), np.ones((3, 4)), moments)
        folder.commit("first", prompt)
    return folder


def test_the_page_shows_every_table_with_its_csv_and_plot(folder, tmp_path):
    pytest.importorskip("matplotlib")
    page = write_report(folder, Recipe((0.5,), "global", 2.0), tmp_path / "report")
    text = page.read_text()
    assert "http" not in text and "<h1>Calibration of Tiny</h1>" in text
    names = {path.stem for path in page.parent.glob("*.csv")}
    assert names > {"budgets", "regularity", "spread", "clipping", "memory", "grouping", "halves"}
    for name in re.findall(r'(?:src|href)="([^"]+)"', text):
        path = page.parent / name
        assert path.exists(), name
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG")
    assert {p.stem for p in page.parent.glob("*.png")} == names - {"halves"}
    with (page.parent / "budgets.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(x["asked"]) for x in rows] == pytest.approx(LEVELS + 0.1, abs=0.1)
    assert np.mean([float(x["held"]) for x in rows]) == pytest.approx(0.5, abs=1e-4)


def test_without_matplotlib_one_line_says_what_to_install(folder, tmp_path, monkeypatch, capsys):
    imported = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    page = write_report(folder, Recipe((0.5,), "global", 2.0), tmp_path / "report")
    err = capsys.readouterr().err
    assert "pip install 'tangram-sglang[report]'" in err and err.count("\n") == 1
    assert not list(page.parent.glob("*.png")) and "<img" not in page.read_text()
    assert (page.parent / "budgets.csv").exists()
