"""Real models' shapes for runs with dummy weights, and plans from published profiles of their heads.

`shapes/` holds the models' configs; a tokenizer of one word a token stands in for theirs. `profiles/` holds what heads of these models kept in the paper's own code
(aiha-lab/tangram, Apache-2.0); each file says how that was measured.
"""

import json
import shutil
from pathlib import Path

import numpy as np
from transformers import AutoConfig

from bench.smollm2 import ROOT
from bench.words import save_word_tokenizer
from tangram_sglang import __version__
from tangram_sglang.plan.file import (
    FORMAT,
    Calibration,
    ModelSpec,
    PlanFile,
    Selection,
    config_hash,
    save_plan,
)
from tangram_sglang.plan.model_config import model_config

SHAPES = Path(__file__).parent / "shapes"
PROFILES = Path(__file__).parent / "profiles"
BUILT = ROOT / "build" / "shapes"
NAMES = {"llama-3.1-8b": "llama-3.1-8b-instruct", "qwen3-4b": "qwen3-4b-instruct-2507"}
ALPHA = 2.0
WINDOW = 512


def shape_folder(name: str) -> Path:
    """A model folder without weights: ``--load-format dummy`` makes them up."""
    folder = BUILT / f"{name}-words"
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        config = SHAPES / f"{name}.json"
        save_word_tokenizer(json.loads(config.read_text())["vocab_size"], folder)
        shutil.copy(config, folder / "config.json")
    return folder


def config_token_bytes(folder: Path, itemsize: int) -> int:
    """Bytes of one token's K and V, over all layers of a model with full attention in each."""
    config = json.loads((folder / "config.json").read_text())
    heads = config["num_key_value_heads"] * config["head_dim"]
    return config["num_hidden_layers"] * 2 * heads * itemsize


def read_profile(name: str, scorer: str = "fastkvzip") -> dict:
    """A published profile of the shape ``name``."""
    return json.loads((PROFILES / f"{scorer}__{NAMES[name]}__global.json").read_text())


def profile_budgets(name: str = "llama-3.1-8b", scorer: str = "fastkvzip") -> list[float]:
    """Budgets min(1, median + 2 sigma) of a profile, in global head order."""
    profile = read_profile(name, scorer)
    center, spread = np.array(profile["context_median"]), np.array(profile["context_std"])
    return np.minimum(1.0, center + ALPHA * spread).flatten().tolist()


def profile_plan(name: str, scorer: str = "fastkvzip") -> Path:
    """A plan file with the budgets of a profile; serving picks tokens by keydiff."""
    profile = read_profile(name, scorer)
    config = model_config(AutoConfig.from_pretrained(shape_folder(name)))
    plan = PlanFile(
        format=FORMAT,
        tool_version=__version__,
        model=ModelSpec(profile["model"], config, config_hash(config)),
        calibration=Calibration(
            scorers=[scorer],
            scope="global",
            retention=round(profile["nominal_ratio"], 6),
            alpha=ALPHA,
            window=WINDOW,
            samples=profile["sample_count"],
            corpus_hash=profile["dataset_mix"],
        ),
        selection=Selection("keydiff"),
        layers=list(range(profile["num_layers_compressed"])),
        budgets=profile_budgets(name, scorer),
        spread=np.array(profile["context_std"]).flatten().tolist(),
    )
    path = BUILT / f"{name}-{scorer}.json"
    save_plan(plan, path)
    return path
