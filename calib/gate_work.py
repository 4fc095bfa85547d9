"""The folder that `tangram train-gate` works in: what a killed run had finished is found there again.

    recipe.json               what is being made; a folder is resumed for the same recipe only
    context-000.safetensors   hidden states and KVzip's scores of one context, by layer
    layer-000.safetensors     the gate of one layer, and how well it ranks before and after training

Files appear whole: they are written beside their name and renamed.
"""

import json
import os
from dataclasses import dataclass, fields
from pathlib import Path

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import save

from tangram_sglang.calib.kvzip import Measured
from tangram_sglang.errors import TangramError
from tangram_sglang.score.gate import Gates


class Recipe(msgspec.Struct, frozen=True):
    """All that decides what comes out.

    Attributes:
        config_hash: of the model's config.
        corpus_hash: of the texts.
        contexts: pieces of them; one in ``held_out`` texts is only measured on.
        longest: tokens of a piece.
        chunk, prompt: how contexts are repeated.
        dim, sinks: d and S of the gates.
        epochs, batch, rate, seed: how gates are fitted.
        device: ``cpu`` or ``cuda``, whose sums differ in the last bits.
    """

    model: str
    config_hash: str
    corpus_hash: str
    contexts: int
    held_out: int
    longest: int
    chunk: int
    prompt: str
    dim: int
    sinks: int
    epochs: int
    batch: int
    rate: float
    seed: int
    device: str


@dataclass(frozen=True, slots=True)
class Fitted:
    """The gate of one layer, and its rank correlation with KVzip on held-out texts."""

    gate: Gates
    untrained: float
    trained: float


class Work:
    """The folder, made or taken up again."""

    def __init__(self, folder: Path, recipe: Recipe):
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "recipe.json"
        if path.exists():
            theirs, mine = json.loads(path.read_bytes()), msgspec.to_builtins(recipe)
            differing = [
                f"{name} is {theirs.get(name)!r} there and {mine.get(name)!r} now"
                for name in sorted({*theirs, *mine})
                if theirs.get(name) != mine.get(name)
            ]
            if differing:
                raise TangramError(
                    f"{folder} holds an unfinished run of another recipe: {'; '.join(differing)}; "
                    "ask for the same again, or remove the folder"
                )
        else:
            _write(path, msgspec.json.format(msgspec.json.encode(recipe), indent=1) + b"\n")

    def has_context(self, index: int) -> bool:
        """Whether a context was measured already."""
        return self._context(index).exists()

    def write_context(self, index: int, measured: Measured) -> None:
        """Keep what was measured of one context; hidden states in bfloat16, scores in fp32."""
        tensors = {}
        for i, (hidden, scores) in enumerate(zip(measured.hidden, measured.scores, strict=True)):
            tensors[f"hidden.{i}"] = hidden.to("cpu", torch.bfloat16).contiguous()
            tensors[f"scores.{i}"] = scores.cpu().contiguous()
        _write(self._context(index), save(tensors))

    def read_context(self, index: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [n, hidden] and scores [n, H] of one layer."""
        with safe_open(self._context(index), framework="pt") as found:
            return found.get_tensor(f"hidden.{layer}"), found.get_tensor(f"scores.{layer}")

    def has_layer(self, layer: int) -> bool:
        """Whether the gate of a layer, by its place among the full-attention ones, was fitted already."""
        return self._layer(layer).exists()

    def write_layer(self, layer: int, fitted: Fitted) -> None:
        """Keep the gate of one layer and its figures."""
        tensors = {f.name: getattr(fitted.gate, f.name).cpu().contiguous() for f in fields(Gates)}
        figures = {"untrained": repr(fitted.untrained), "trained": repr(fitted.trained)}
        _write(self._layer(layer), save(tensors, figures))

    def read_layer(self, layer: int) -> Fitted:
        with safe_open(self._layer(layer), framework="pt") as found:
            gate = Gates(**{f.name: found.get_tensor(f.name) for f in fields(Gates)})
            figures = {name: float(x) for name, x in found.metadata().items()}
        return Fitted(gate, **figures)

    def _context(self, index: int) -> Path:
        return self._folder / f"context-{index:03}.safetensors"

    def _layer(self, layer: int) -> Path:
        return self._folder / f"layer-{layer:03}.safetensors"


def _write(path: Path, content: bytes) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content)
    os.replace(partial, path)
