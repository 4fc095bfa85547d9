"""The model that is measured: a shape with dummy weights on a GPU, or any small model on this CPU."""

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.lively import save_norms
from bench.shapes import NAMES, config_token_bytes, profile_plan, shape_folder
from tangram_sglang.cli.server import LOOPBACK, cpu_arguments, cpu_environment

MEASURED_BY_US = ("--attention-backend", "--max-total-tokens")


@dataclass(frozen=True)
class Subject:
    """A model as every server gets it.

    Attributes:
        name: for tables.
        folder: config and tokenizer, with or without weights.
        token_bytes: K and V of one token, over all layers.
        flags: which model, how it is loaded, and what SGLang needs on this machine.
        environment: of every server, without our settings.
        plan: budgets of its heads; None: the same for all.
        dummy: whether its weights are made up.
    """

    name: str
    folder: Path
    token_bytes: int
    flags: tuple[str, ...]
    environment: Mapping[str, str]
    plan: Path | None
    dummy: bool

    @property
    def vocabulary(self) -> int:
        return json.loads((self.folder / "config.json").read_text())["vocab_size"]

    def norms(self, scratch: Path) -> Path | None:
        """A folder for `lively.enliven`, or None where weights are real."""
        return save_norms(self.folder, scratch / "norms") if self.dummy else None


def subject(options: argparse.Namespace) -> Subject:
    """From ``--model``, ``--profile``, ``--plan`` and ``--cpu``; SystemExit says what is not there."""
    if options.cpu and not (Path(options.model) / "config.json").is_file():
        raise SystemExit(
            f"error: --model {options.model}: --cpu expects a folder with a config.json"
        )
    if options.plan and not Path(options.plan).is_file():
        raise SystemExit(f"error: --plan {options.plan}: no such file")
    if wrong := [x for x in options.settings if "=" not in x]:
        raise SystemExit(f"error: --settings {wrong[0]}: expected NAME=VALUE")
    return _on_cpu(options) if options.cpu else _on_gpu(options)


def _on_gpu(options) -> Subject:
    name = options.model
    if name not in NAMES:
        raise SystemExit(f"error: --model {name}: expected one of {', '.join(NAMES)}, or --cpu")
    folder = shape_folder(name)
    flags = (
        *("--model-path", str(folder), "--load-format", "dummy", "--dtype", "bfloat16"),
        *("--chunked-prefill-size", "8192", "--mem-fraction-static", "0.9"),
        # they take long to capture and matter to short prompts only
        "--disable-prefill-cuda-graph",
        *("--enable-metrics", "--enable-cache-report", "--random-seed", "0"),
    )
    plan = Path(options.plan) if options.plan else profile_plan(name, options.profile)
    environment = {**os.environ, **LOOPBACK}
    return Subject(name, folder, config_token_bytes(folder, 2), flags, environment, plan, True)


def _on_cpu(options) -> Subject:
    folder = Path(options.model)
    flags = cpu_arguments(folder, "")
    for name in MEASURED_BY_US:
        at = flags.index(name)
        del flags[at : at + 2]
    dummy = not any(folder.glob("*.safetensors"))
    if dummy:
        flags += ["--load-format", "dummy"]
    plan = Path(options.plan) if options.plan else None
    return Subject(
        folder.name,
        folder,
        config_token_bytes(folder, 4),
        (*flags, "--random-seed", "0"),
        cpu_environment({}),
        plan,
        dummy,
    )
