"""`tangram calibrate`: runs SGLang with the tangram backend in observe mode and writes plan files.

The server keeps every token while it is watched, so the same code measures any model that SGLang
loads with this backend, on a GPU where there is one.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from tangram_sglang.calib.shares import SCOPES
from tangram_sglang.cli.retention import retention
from tangram_sglang.cli.server import (
    LOOPBACK,
    Server,
    ServerError,
    cpu_arguments,
    cpu_environment,
)
from tangram_sglang.errors import TangramError
from tangram_sglang.plan.window import WindowRule
from tangram_sglang.score import create_scorer
from tangram_sglang.settings import Settings

BACKEND = "tangram"
CHUNK = 2048


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
        "--samples", type=int, default=50, help="windows to measure, at least (%(default)s)"
    )
    parser.add_argument(
        "--alpha",
        type=float,
        default=2.0,
        help="budgets are mean + ALPHA standard deviations of a head's share (%(default)s)",
    )
    parser.add_argument(
        "--scope",
        choices=SCOPES,
        default="global",
        help="take a window's top tokens over all heads, or layer by layer (%(default)s)",
    )
    parser.add_argument(
        "--budgets-from",
        type=lambda text: tuple(text.split(",")),
        default=("keydiff",),
        metavar="SCORER[,SCORER...]",
        help="scorers whose budgets are averaged (keydiff)",
    )
    parser.add_argument("--window", type=int, default=512, help="W, in tokens (%(default)s)")
    parser.add_argument(
        "--observations", type=Path, help="keep the measurements in this new or empty folder"
    )


def run(arguments: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="tangram-calibrate-") as scratch:
        log = Path(scratch) / "server.log"
        observations = arguments.observations or Path(scratch) / "observations"
        try:
            paths = _calibrate(arguments, observations, log)
        except ServerError as error:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
            print(f"{tail}\ntangram calibrate: error: {error}", file=sys.stderr)
            return 1
    for path in paths:
        print(path)
    return 0


def _calibrate(arguments: argparse.Namespace, observations: Path, log: Path) -> list[Path]:
    from tqdm import tqdm

    from tangram_sglang.calib import calibrate, texts
    from tangram_sglang.calib import observations as files

    _check(arguments)
    if observations.exists() and any(observations.iterdir()):
        raise TangramError(f"{observations} is not empty; name a new folder with --observations")
    settings = Settings(retention=1.0, window=arguments.window)
    rule = WindowRule(settings.window, settings.recent, settings.page, settings.sinks)
    tokenizer, config = _load(arguments.model)
    chosen, prompts = texts.calibration_prompts(tokenizer, rule, arguments.samples)
    observations.mkdir(parents=True, exist_ok=True)
    asked = sorted({*files.RETENTIONS, *arguments.retention})
    files.write_request(observations, files.Request(list(arguments.budgets_from), asked))
    server_arguments, environment = _server(arguments, observations)
    with Server(server_arguments, environment, log) as server:
        print(f"{server.command_line}\nlog: {log}", file=sys.stderr)
        server.wait_until_ready()
        with tqdm(total=sum(map(len, prompts)), unit=" tokens", disable=None) as bar:
            for text, prompt in zip(chosen, prompts, strict=True):
                bar.set_description(f"{text.kind}: {text.name}")
                try:
                    calibrate.feed(server.url, prompt)
                except OSError as error:
                    server.check_alive()
                    raise ServerError(f"no answer for {text.name}: {error}") from error
                bar.update(len(prompt))
    expected = sum(rule.sealed(len(prompt)) for prompt in prompts)
    if (found := files.count_windows(observations)) != expected:
        raise TangramError(
            f"the server showed {found} windows of {expected}: it must serve these prompts alone, "
            "in one process, and reuse no prefix"
        )
    recipe = calibrate.Recipe(
        retentions=arguments.retention,
        profiles=arguments.budgets_from,
        scope=arguments.scope,
        alpha=arguments.alpha,
        window=arguments.window,
        corpus_hash=texts.corpus_hash(chosen),
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    model_id = Path(arguments.model).resolve().name
    return calibrate.write_plans(observations, arguments.out, model_id, config, recipe)


def _check(arguments: argparse.Namespace) -> None:
    if arguments.samples < 2:
        raise TangramError(f"--samples {arguments.samples}: a spread needs at least 2 windows")
    if not 0.0 <= arguments.alpha < float("inf"):
        raise TangramError(f"--alpha {arguments.alpha}: expected a number of at least 0")
    for name in arguments.budgets_from:
        if missing := create_scorer(name).needs - {"query_stats"}:
            raise TangramError(
                f"--budgets-from {name}: it needs {', '.join(sorted(missing))}, which calibration does "
                "not hand over yet; choose one that reads K and V only, such as keydiff"
            )
        if "query_stats" in create_scorer(name).needs:
            raise TangramError(
                f"--budgets-from {name}: it needs query statistics, which this command makes; "
                "choose scorers that need none, such as keydiff"
            )


def _load(model: str):
    """Tokenizer and text config of a model."""
    from transformers import AutoConfig, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(model).get_text_config()
        return AutoTokenizer.from_pretrained(model), config
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise TangramError(f"--model {model} cannot be loaded: {reason}") from None


def _server(arguments: argparse.Namespace, observations: Path) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of a server that observes."""
    import torch

    settings = {
        "TANGRAM_RETENTION": "1.0",
        "TANGRAM_WINDOW": str(arguments.window),
        "TANGRAM_OBSERVE": str(observations.resolve()),
    }
    # a window that the prefix cache holds already would not be observed
    chunk = ["--chunked-prefill-size", str(CHUNK), "--disable-radix-cache"]
    if torch.cuda.is_available():
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("TANGRAM_")}
        return [
            *("--model-path", str(arguments.model)),
            *("--attention-backend", BACKEND),
            "--cuda-graph-backend-decode=disabled",
            "--cuda-graph-backend-prefill=disabled",
            "--skip-server-warmup",
            *chunk,
        ], {**inherited, **LOOPBACK, **settings}
    environment = {
        k: v
        for k, v in cpu_environment(settings).items()
        if not k.startswith("TANGRAM_") or k in settings or k == "TANGRAM_CPU_PLATFORM"
    }
    return [*cpu_arguments(arguments.model, BACKEND), *chunk], environment


def _retentions(text: str) -> tuple[float, ...]:
    return tuple(dict.fromkeys(retention(part) for part in text.split(",")))
