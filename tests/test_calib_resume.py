"""A calibration that is cut off goes on, one that is repeated measures nothing, and none replaces another."""

from collections import Counter

import pytest

from tangram_sglang.calib import calibrate as feeding
from tangram_sglang.calib.observations import read_queries
from tangram_sglang.calib.run_folder import RunFolder
from tangram_sglang.cli import calibrate, main
from tests.calib_stand_in import StandIn
from tests.reference.tiny import save, tiny_llama

PROFILES = "keydiff,expected_attention,error"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save(tiny_llama(seed=1), tmp_path_factory.mktemp("models") / "Tiny-Llama")


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setattr(calibrate, "Server", StandIn)


def run(model, out, *more):
    argv = ["--model", model, "--retention", "0.5", "--out", out, "--window", 64, "--samples", 15]
    return main(["calibrate", *map(str, [*argv, "--budgets-from", PROFILES, *more])])


def contents(out):
    names = ("tiny-llama-rho0.5.json", "tiny-llama-query-stats.safetensors")
    files = [out / name for name in names]
    files += sorted((out / "tiny-llama-report").glob("*.csv"))
    return {path.name: path.read_bytes() for path in files}


def cut_off_before(call, monkeypatch):
    """The process dies when it is about to send prompt number ``call``."""
    feed, calls = feeding.feed, Counter()

    def dying(url, prompt):
        calls["sent"] += 1
        if calls["sent"] == call:
            # the observer had begun: half a prompt must not count
            StandIn.last.answer({"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}})
            raise KeyboardInterrupt
        feed(url, prompt)

    monkeypatch.setattr(feeding, "feed", dying)


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """What a run that nobody disturbs leaves behind, and how many prompts it sends."""
    out = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate, "Server", StandIn)
        assert run(model, out) == 0
    return contents(out), len(StandIn.last.prompts)


@pytest.mark.parametrize("where", ["first prompt", "first pass", "second pass", "last prompt"])
def test_a_run_that_was_cut_off_goes_on_to_the_same_end(model, tmp_path, monkeypatch, whole, where):
    expected, prompts = whole
    call = {
        "first prompt": 1,
        "first pass": prompts // 4,
        "second pass": prompts // 2 + 2,
        "last prompt": prompts,
    }[where]
    with monkeypatch.context() as patch:
        cut_off_before(call, patch)
        with pytest.raises(KeyboardInterrupt):
            run(model, tmp_path)
    assert not list(tmp_path.glob("*.json"))
    assert run(model, tmp_path) == 0
    assert len(StandIn.last.prompts) == prompts - (call - 1)
    assert contents(tmp_path) == expected


def test_a_run_cut_off_between_two_files_of_a_prompt_goes_on(model, tmp_path, monkeypatch, whole):
    """The sums are renamed last: without them the prompt's windows do not count."""
    with monkeypatch.context() as patch:
        cut_off_before(4, patch)
        with pytest.raises(KeyboardInterrupt):
            run(model, tmp_path)
    first = tmp_path / "tiny-llama-observations" / "first"
    kept = next(first.glob("p002-window-*"))
    kept.with_name("p003-window-00099.npz").write_bytes(kept.read_bytes())
    assert run(model, tmp_path) == 0
    assert contents(tmp_path) == whole[0]


def test_a_repeated_command_measures_nothing(model, tmp_path, monkeypatch, whole):
    assert run(model, tmp_path) == 0
    folder = tmp_path / "tiny-llama-observations"
    stage = RunFolder.read(folder)
    count = read_queries(stage.sums()).count

    def refuse(*args):
        raise AssertionError("a server was started")

    monkeypatch.setattr(calibrate, "Server", refuse)
    assert run(model, tmp_path) == 0
    assert contents(tmp_path) == whole[0]
    assert (
        read_queries(stage.sums()).count
        == count
        == sum(stage.run.tokens) - 4 * len(stage.run.tokens)
    )
    # other plans from the same measurements go elsewhere
    assert run(model, tmp_path / "b", "--alpha", 1, "--observations", folder) == 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        pytest.param(["--alpha", 1], "(its alpha is 2.0, here it is 1.0)", id="alpha"),
        pytest.param(["--samples", 6], "(its corpus_hash is ", id="texts"),
        pytest.param(["--budgets-from", "keydiff"], "(its scorers is [", id="profiles"),
    ],
)
def test_a_plan_of_another_calibration_is_not_overwritten(model, tmp_path, capsys, argv, message):
    assert run(model, tmp_path) == 0
    before = contents(tmp_path)
    assert run(model, tmp_path, *argv) == 2
    assert message in capsys.readouterr().err
    assert contents(tmp_path) == before
    assert run(model, tmp_path, *argv, "--overwrite", "--observations", tmp_path / "other") == 0
    assert contents(tmp_path) != before


def test_statistics_that_other_plans_name_are_not_overwritten(model, tmp_path, capsys):
    assert run(model, tmp_path) == 0
    before = contents(tmp_path)
    more = ["--retention", "0.25", "--samples", 6, "--observations", tmp_path / "other"]
    assert run(model, tmp_path, *more) == 2
    assert "belongs to other query statistics" in capsys.readouterr().err
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        pytest.param(lambda x: (x / "a").touch(), "is not empty and holds no calibration", id="a"),
        pytest.param(lambda x: (x / "run.json").touch(), "no calibration that can be read", id="b"),
    ],
)
def test_a_folder_of_other_things_is_left_alone(model, tmp_path, capsys, prepare, message):
    folder = tmp_path / "observations"
    folder.mkdir()
    prepare(folder)
    assert run(model, tmp_path, "--observations", folder) == 2
    assert message in capsys.readouterr().err
    assert len(list(folder.iterdir())) == 1


def test_measurements_of_another_run_are_not_gone_on_with(model, tmp_path, capsys):
    assert run(model, tmp_path / "a", "--observations", tmp_path / "o") == 0
    assert run(model, tmp_path / "b", "--observations", tmp_path / "o", "--samples", 6) == 2
    assert "holds measurements of another run: corpus_hash is" in capsys.readouterr().err
