"""`tangram calibrate`: runs SGLang with the tangram backend in observe mode and writes plan files.

The server keeps every token while it is watched, so the same code measures any model that SGLang
loads with this backend, on a GPU where there is one. Measurements are files, written prompt by
prompt: a command that was cut off goes on where it stopped, and one that is repeated measures nothing.
"""

import argparse
import os
import shlex
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tangram_sglang.calib.profiles import ERROR
from tangram_sglang.calib.run_folder import Run, RunFolder
from tangram_sglang.calib.shares import SCOPES
from tangram_sglang.calib.stages import Stage, run_stages, stages, tokens_left
from tangram_sglang.calib.targets import check_beside, check_targets, gates_path, plan_path
from tangram_sglang.cli.folders import check_folder
from tangram_sglang.cli.hugging_face import load_config
from tangram_sglang.cli.retention import retention
from tangram_sglang.cli.server import (
    LOOPBACK,
    Server,
    ServerError,
    cpu_arguments,
    cpu_environment,
)
from tangram_sglang.errors import TangramError
from tangram_sglang.plan.file import config_hash
from tangram_sglang.plan.gates import GateFile, load_gates
from tangram_sglang.plan.model_config import model_config
from tangram_sglang.plan.window import WindowRule
from tangram_sglang.score import create_scorer, known_scorers
from tangram_sglang.settings import Settings

BACKEND = "tangram"
CHUNK = 2048
SELECTION = "expected_attention"
# settings that a calibration neither makes nor clears
KEPT_SETTINGS = ("TANGRAM_CPU_PLATFORM",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="folder or hub name of the model")
    parser.add_argument(
        "--retention",
        type=_retentions,
        required=True,
        metavar="RHO[,RHO...]",
        help="share of tokens kept; one plan is written for each",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the plans")
    parser.add_argument(
        "--samples",
        type=int,
        default=50,
        help="windows that every profile gets, at least (%(default)s); `error` can use none that is not "
        "followed by W + R tokens, and profiles that read query statistics none that begins a text",
    )
    parser.add_argument(
        "--alpha",
        type=float,
        default=2.0,
        help="budgets are mean + ALPHA standard deviations of a head's share (%(default)s); without effect "
        "on those from `error`",
    )
    parser.add_argument(
        "--scope",
        choices=SCOPES,
        default="global",
        help="share out a window's tokens over all heads, or layer by layer (%(default)s)",
    )
    parser.add_argument(
        "--budgets-from",
        type=_names,
        default=(ERROR,),
        metavar="PROFILE[,PROFILE...]",
        help="scorers whose budgets are averaged, and `error`: budgets that minimise what "
        "compression does to the attention output, best alone (error)",
    )
    parser.add_argument(
        "--select",
        default=SELECTION,
        metavar="SCORER",
        help="scorer that picks tokens when serving (%(default)s)",
    )
    parser.add_argument(
        "--gates",
        type=Path,
        metavar="FILE",
        help="gates that the scorer of --select reads, made by `tangram train-gate`: copied to OUT and "
        f"named by the plans; profile `error` then measures with {SELECTION}",
    )
    parser.add_argument(
        "--texts", type=Path, metavar="DIR", help="calibrate on the *.txt in DIR, not on our texts"
    )
    parser.add_argument("--window", type=int, default=512, help="W, in tokens (%(default)s)")
    parser.add_argument(
        "--observations",
        type=Path,
        metavar="DIR",
        help="folder of the measurements (OUT/<model>-observations)",
    )
    parser.add_argument(
        "--report", type=Path, metavar="DIR", help="folder of the report (OUT/<model>-report)"
    )
    parser.add_argument(
        "--server-args",
        type=shlex.split,
        default=[],
        metavar="ARGS",
        help="further arguments of the server, in one string: --server-args='--load-format dummy'",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace plans of another calibration in OUT"
    )


def run(arguments: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="tangram-calibrate-") as scratch:
        log = Path(scratch) / "server.log"
        try:
            paths = _calibrate(arguments, log)
        except ServerError as error:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
            print(f"{tail}\ntangram calibrate: error: {error}", file=sys.stderr)
            return 1
    for path in paths:
        print(path)
    return 0


def _calibrate(arguments: argparse.Namespace, log: Path) -> list[Path]:
    from tangram_sglang.calib import calibrate, report, texts
    from tangram_sglang.calib import observations as files

    _check(arguments)
    # the report comes last, after minutes
    for name in ("out", "observations", "report"):
        if (path := getattr(arguments, name)) is not None:
            check_folder(f"--{name}", path, path)
    settings = Settings(retention=1.0, window=arguments.window)
    rule = WindowRule(settings.window, settings.recent, settings.page, settings.sinks)
    own = None if arguments.texts is None else texts.texts_in(arguments.texts)
    tokenizer, config = load_config(arguments.model)
    gates = None if arguments.gates is None else load_gates(arguments.gates, config)
    profiles = arguments.budgets_from
    chosen, prompts = texts.calibration_prompts(
        tokenizer,
        rule,
        arguments.samples,
        own,
        followed=ERROR in profiles,
        behind=any("query_stats" in create_scorer(x).needs for x in profiles if x != ERROR),
    )
    described = Run(
        model=Path(arguments.model).resolve().name,
        config_hash=config_hash(model_config(config)),
        window=rule.window,
        recent=rule.recent,
        sinks=rule.sinks,
        profiles=list(arguments.budgets_from),
        # observing hands over no gate scores
        selection=arguments.select if gates is None else SELECTION,
        retentions=sorted({*files.RETENTIONS, *arguments.retention}),
        corpus_hash=texts.corpus_hash(chosen),
        texts=[(text.kind, text.name) for text in chosen],
        tokens=[len(prompt) for prompt in prompts],
    )
    out, stem = arguments.out, described.model.lower()
    recipe = calibrate.Recipe(
        arguments.retention, arguments.scope, arguments.alpha, arguments.select, gates
    )
    if not arguments.overwrite:
        _check_targets(arguments, described, gates)
    folder = RunFolder.open(arguments.observations or out / f"{stem}-observations", described)
    wanted = stages(arguments.budgets_from, described.selection)
    if tokens_left(folder, wanted):
        _measure(arguments, folder, wanted, prompts, rule, log)
    paths = calibrate.write_plans(folder, out, config, recipe, arguments.overwrite)
    page = report.write_report(folder, recipe, arguments.report or out / f"{stem}-report")
    print(f"report: {page}", file=sys.stderr)
    return paths


def _check_targets(arguments: argparse.Namespace, run: Run, gates: GateFile | None) -> None:
    out, retentions = arguments.out, arguments.retention
    sha256 = None if gates is None else gates.sha256
    check_targets(out, run, retentions, arguments.scope, arguments.alpha, arguments.select, sha256)
    if sha256 is not None:
        written = [plan_path(out, run.model, rho) for rho in retentions]
        check_beside("gates", gates_path(out, run.model), sha256, written)


def _measure(
    arguments: argparse.Namespace,
    folder: RunFolder,
    wanted: list[Stage],
    prompts: list[list[int]],
    rule: WindowRule,
    log: Path,
) -> None:
    from tqdm import tqdm

    from tangram_sglang.calib import calibrate

    left, total = tokens_left(folder, wanted), len(wanted) * sum(folder.run.tokens)
    if left < total:
        print(
            f"going on with {folder.path}: {total - left} of {total} tokens are there",
            file=sys.stderr,
        )
    server_arguments, environment = _server(arguments, folder.live)
    # the server reads it when it starts
    folder.live.mkdir(exist_ok=True)
    with Server(server_arguments, environment, log) as server:
        print(f"{server.command_line}\nlog: {log}", file=sys.stderr)
        server.wait_until_ready()
        with tqdm(total=total, initial=total - left, unit=" tokens", disable=None) as bar:

            def show(stage: Stage, i: int) -> None:
                kind, name = folder.run.texts[i]
                bar.set_description(f"{stage.name} pass, {kind}: {name}")
                try:
                    calibrate.feed(server.url, prompts[i])
                except OSError as error:
                    server.check_alive()
                    raise ServerError(f"no answer for {name}: {error}") from error
                bar.update(len(prompts[i]))

            run_stages(folder, wanted, prompts, rule, show)


def _check(arguments: argparse.Namespace) -> None:
    if arguments.samples < 2:
        raise TangramError(f"--samples {arguments.samples}: a spread needs at least 2 windows")
    if not 0.0 <= arguments.alpha < float("inf"):
        raise TangramError(f"--alpha {arguments.alpha}: expected a number of at least 0")
    for name in arguments.budgets_from:
        if name != ERROR and name not in known_scorers():
            raise TangramError(
                f"--budgets-from {name}: unknown profile; expected {ERROR}, our own, or a scorer's: "
                f"{', '.join(known_scorers())}"
            )
        if name != ERROR and "hidden" in create_scorer(name).needs:
            raise TangramError(
                f"profile {name} reads gates, which calibration does not measure with: calibrate with "
                f"another one; --select {name} --gates FILE makes plans that serve with it"
            )
    reads = "hidden" in create_scorer(arguments.select, "--select").needs
    if reads and arguments.gates is None:
        raise TangramError(
            f"--select {arguments.select}: scorer {arguments.select} reads gates, name their file with "
            "--gates (tangram train-gate makes one)"
        )
    if arguments.gates is not None and not reads:
        raise TangramError(
            f"--gates {arguments.gates}: scorer {arguments.select} reads none; drop it, or --select one "
            "that does"
        )


def _server(arguments: argparse.Namespace, live: Path) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of a server that observes."""
    import torch

    settings = {
        "TANGRAM_RETENTION": "1.0",
        "TANGRAM_WINDOW": str(arguments.window),
        "TANGRAM_OBSERVE": str(live.resolve()),
    }
    # a window that the prefix cache holds already would not be observed
    chunk = ["--chunked-prefill-size", str(CHUNK), "--disable-radix-cache"]
    if torch.cuda.is_available():
        inherited = _without_settings(os.environ)
        return [
            *("--model-path", str(arguments.model)),
            *("--attention-backend", BACKEND),
            "--cuda-graph-backend-decode=disabled",
            "--cuda-graph-backend-prefill=disabled",
            "--skip-server-warmup",
            *chunk,
            *arguments.server_args,
        ], {**inherited, **LOOPBACK, **settings}
    environment = {**_without_settings(cpu_environment({})), **settings}
    flags = [*cpu_arguments(arguments.model, BACKEND), *chunk, *arguments.server_args]
    return flags, environment


def _without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        k: v for k, v in environment.items() if not k.startswith("TANGRAM_") or k in KEPT_SETTINGS
    }


def _retentions(text: str) -> tuple[float, ...]:
    return tuple(dict.fromkeys(retention(part) for part in text.split(",")))


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text.split(",")))
