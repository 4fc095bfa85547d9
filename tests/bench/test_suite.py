"""bench/session.py and bench/suite.py: several experiments on servers that are started once."""

import csv
import importlib
from dataclasses import replace

import pytest

from bench import client, session, suite
from bench.experiment import Experiment
from bench.gate import Verdict
from bench.subject import Subject
from bench.suite import asked_for

VERDICT = Verdict(True, "passed")


class StandIn:
    """A server that is not there."""

    url = "here"

    def log_tail(self, lines):
        return "its log"


class FleetStandIn:
    """Groups that were started; only entries count."""

    def __init__(self, entries, shared, environment, logs):
        self.entries, self.shared = entries, shared

    def __enter__(self):
        EVENTS.append(("start", *(x.name for x in self.entries)))
        return self

    def __exit__(self, *exc_info):
        EVENTS.append(("stop",))

    def __iter__(self):
        return iter([(entry, StandIn()) for entry in self.entries])

    def wait_until_ready(self):
        EVENTS.append(("ready",))


EVENTS: list[tuple] = []


@pytest.fixture
def events(monkeypatch, tmp_path):
    """Servers, the gate and what takes time are stand-ins."""
    EVENTS.clear()
    model = Subject("m", tmp_path, 8, (), {}, None, False)
    (tmp_path / "config.json").write_text('{"vocab_size": 100}')
    monkeypatch.setattr(session, "Fleet", FleetStandIn)
    monkeypatch.setattr(session, "subject", lambda options: model)
    monkeypatch.setattr(session, "facts", lambda module: {"command": module})
    monkeypatch.setattr(session.gate, "check", lambda **asked: EVENTS.append(("gate",)) or VERDICT)
    return EVENTS


def experiment(name: str, breaks_on: str = "", pool_tokens: int = 1000) -> Experiment:
    def on_server(now, entry, server):
        EVENTS.append((name, entry.name))
        now.report.add(entry, name, {}, now.runs(lambda seed: {"speed": 2.0}), "speed")
        if entry.name == breaks_on:
            raise RuntimeError(f"{name} broke")

    return Experiment(
        f"bench.{name}",
        f"What {name} is.",
        pool_tokens,
        running=16,
        on_server=on_server,
        add_options=lambda parser: parser.add_argument("--size", type=int, default=3),
        load_client=lambda: EVENTS.append(("load", name)),
    )


def known(monkeypatch, *experiments: Experiment) -> None:
    monkeypatch.setattr(suite, "KNOWN", {x.name: x for x in experiments})


def test_one_experiment_is_finished_on_all_servers_before_the_next(
    events, monkeypatch, tmp_path, capsys
):
    known(monkeypatch, experiment("one"), experiment("two"))
    asked = asked_for(["--results", str(tmp_path), "--baselines", "triton", "one --size 5", "two"])
    assert session.run("bench.suite", asked) == 0
    servers = ("triton", "tangram 1", "tangram 0.25")
    assert events == [
        *[("start", *servers), ("load", "one"), ("load", "two"), ("ready",), ("gate",)],
        *[("one", x) for x in servers],
        *[("two", x) for x in servers],
        ("stop",),
    ]
    for name in ("one", "two"):
        with (tmp_path / f"{name}.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        # one gate for all of them
        assert [(x["server"], x["gate"], x["times_stock"]) for x in rows] == [
            (server, "passed", "1.0") for server in servers
        ]
        assert {x["command"] for x in rows} == {"bench.suite"}
    shown = capsys.readouterr().out
    assert shown.count("gate: passed") == 2
    assert shown.index("one\n") < shown.index("two\n")


def test_a_later_group_has_the_verdict_of_the_first(events, monkeypatch, tmp_path):
    known(monkeypatch, experiment("one"), experiment("two"))
    retentions = ["--retentions", "1", "0.5", "0.25", "0.1"]
    front = ["--results", str(tmp_path), "--baselines", "triton", *retentions]
    assert session.run("bench.suite", asked_for([*front, "one", "two"])) == 0
    groups = [x for x in events if x[0] in ("one", "two", "start", "gate")]
    assert groups[8:] == [
        ("start", "tangram 0.25", "tangram 0.1"),
        *[("one", "tangram 0.25"), ("one", "tangram 0.1")],
        *[("two", "tangram 0.25"), ("two", "tangram 0.1")],
    ]
    with (tmp_path / "two.csv").open(newline="") as file:
        assert [x["gate"] for x in csv.DictReader(file)] == ["passed"] * 5


def test_one_that_fails_does_not_end_the_others(events, monkeypatch, tmp_path, capsys):
    known(monkeypatch, experiment("one", breaks_on="tangram 1"), experiment("two"))
    front = ["--results", str(tmp_path), "--baselines", "triton", "--at-once", "2"]
    assert session.run("bench.suite", asked_for([*front, "one", "two"])) == 1
    measured = [x for x in events if x[0] in ("one", "two")]
    assert measured == [
        *[("one", "triton"), ("one", "tangram 1")],
        *[("two", "triton"), ("two", "tangram 1"), ("two", "tangram 0.25")],
    ]
    shown = capsys.readouterr()
    assert "one failed on tangram 1:\nTraceback" in shown.err
    assert "RuntimeError: one broke" in shown.err
    assert "its log" in shown.err
    # what it had measured by then is kept
    assert (tmp_path / "one.csv").read_text().count("triton") == 1
    assert shown.out.count("triton") == 2


def test_a_client_that_cannot_be_had_ends_one_experiment(events, monkeypatch, tmp_path, capsys):
    def load(*given):
        raise ModuleNotFoundError("no client")

    def leave(*given):
        raise SystemExit(1)

    one = replace(experiment("one"), load_client=load, on_server=load)
    two = replace(experiment("two"), on_server=leave)
    known(monkeypatch, one, two, experiment("three"))
    front = ["--results", str(tmp_path), "--baselines", "triton"]
    assert session.run("bench.suite", asked_for([*front, "one", "two", "three"])) == 1
    assert len([x for x in events if x[0] == "three"]) == 3
    shown = capsys.readouterr()
    assert "ModuleNotFoundError: no client" in shown.err
    assert "two failed on triton" in shown.err
    assert shown.out.count("nothing measured") == 2


def test_a_stand_in_is_there_while_others_are_imported_and_gone_after():
    with client.stand_in("nothing_of_that_name", given=None):
        found = importlib.import_module("nothing_of_that_name")
        assert found.given is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("nothing_of_that_name")
    with client.stand_in("csv", reader=None):
        assert csv.reader is not None


def test_servers_are_not_started_for_nothing(events, monkeypatch, tmp_path, capsys):
    known(monkeypatch, experiment("one", breaks_on="triton"), experiment("two"))
    front = ["--results", str(tmp_path), "--baselines", "triton", "--at-once", "1"]
    assert session.run("bench.suite", asked_for([*front, "one"])) == 1
    assert [x for x in events if x[0] == "start"] == [("start", "triton")]
    assert "not started: tangram 1" in capsys.readouterr().err
    events.clear()
    # the limit counts for all from the start of the suite
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    assert session.run("bench.suite", asked_for([*front, "--limit-s", "25", "two", "two"])) == 0
    assert [x for x in events if x[0] == "start"] == [("start", "triton")]
    shown = capsys.readouterr()
    assert shown.err.count("left out, as 25 s are spent") == 1
    assert shown.out.count("nothing measured") == 1


def test_an_interrupt_ends_all_and_still_prints_what_there_is(
    events, monkeypatch, tmp_path, capsys
):
    def interrupt(now, entry, server):
        raise KeyboardInterrupt

    two = replace(experiment("two"), on_server=interrupt)
    known(monkeypatch, experiment("one"), two)
    asked = asked_for(["--results", str(tmp_path), "--baselines", "triton", "one", "two"])
    with pytest.raises(KeyboardInterrupt):
        session.run("bench.suite", asked)
    assert events[-1] == ("stop",)
    shown = capsys.readouterr().out
    assert "tangram 0.25" in shown
    assert "nothing measured" in shown


def test_options_in_front_are_for_all_and_its_own_for_one():
    front = ["--cpu", "--settings", "WINDOW=64", "--limit-s", "9", "--retentions", "1", "0.5"]
    texts = [
        "offline --cases long --repeats 2 --csv x.csv",
        "server_decode",
        "multi_turn --turns 3",
    ]
    (offline, one), (decode, two), (_, three) = asked_for([*front, *texts])
    assert (offline.name, decode.name) == ("offline", "server_decode")
    assert {x.limit_s for x in (one, two, three)} == {9}
    assert {tuple(x.retentions) for x in (one, two, three)} == {(1, 0.5)}
    assert {(x.pool_tokens, x.max_running) for x in (one, two, three)} == {(152_000, 64)}
    assert (one.cases, one.csv.name, three.csv.name) == (["long"], "x.csv", "multi_turn.csv")
    assert (one.repeats, two.repeats, three.repeats, three.turns) == (2, 3, 1, 3)
    assert two.batch_sizes == [1, 8, 32]
    again = asked_for(["--repeats", "4", "offline", "offline --repeats 5", "server_decode"])
    assert [x.repeats for _, x in again] == [4, 5, 4]
    # as many requests at once as the one with the most
    (_, one), (_, two) = asked_for(["offline", "shared_document"])
    assert one.max_running == two.max_running == 128
    ((_, one),) = asked_for(["--max-running", "8", "offline"])
    assert one.max_running == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["offline", "nothing"], "unknown experiment nothing; known: offline, multi_turn"),
        (["--baselines", "triton", "nothing --x 1"], "unknown experiment nothing"),
        (["--limit-s", "9", "nothing"], "unknown experiment nothing"),
        (["offline", "ablation --heads 1"], "ablation needs servers of its own: run python -m"),
        (["reclaim"], "reclaim needs servers of its own"),
        (["offline --model x"], "offline: --model is no option of its own; .* in front"),
        (["offline --limit-s 5", "arrival"], "offline: --limit-s is no option of its own"),
        (["multi_turn --cases long"], "multi_turn: --cases is no option of its own"),
        (["--cases", "long", "offline"], "--cases is no option of all experiments"),
        (["--csv", "x", "offline"], "--csv is no option of all experiments"),
        (["--cpu"], "no experiment; known: offline"),
        (["offline", "arrival 'x"], "arrival 'x: No closing quotation"),
    ],
)
def test_what_cannot_be_is_refused_by_name(arguments, message):
    with pytest.raises(SystemExit, match=f"error: {message}"):
        asked_for(arguments)


def test_all_get_one_pool(monkeypatch):
    known(monkeypatch, experiment("one"), experiment("two", pool_tokens=2000))
    with pytest.raises(SystemExit, match=r"pools differ \(one 1000, two 2000\): .* --pool-tokens"):
        asked_for(["one", "two"])
    found = asked_for(["--pool-tokens", "1500", "one", "two"])
    assert [x.pool_tokens for _, x in found] == [1500, 1500]


def test_a_check_refuses_before_servers_start(events, monkeypatch, tmp_path):
    def check(now):
        raise SystemExit(f"error: {now.pool.tokens} are too few")

    known(monkeypatch, experiment("one"), replace(experiment("two"), check=check))
    with pytest.raises(SystemExit, match="1000 are too few"):
        session.run("bench.suite", asked_for(["--results", str(tmp_path), "one", "two"]))
    assert events == []
