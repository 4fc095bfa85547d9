"""The gate file: trained gates of one model in one safetensors, with what they were made for and from.

Its metadata holds, each as text or JSON: ``format``, ``tool_version``, ``model`` (a name), ``config`` and
``config_hash`` as in a plan, ``layers``, ``architecture``, ``recipe`` and ``corpus_hash``.
"""

import hashlib
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, deserialize
from safetensors.torch import load, save

from tangram_sglang import __version__
from tangram_sglang.errors import TangramError
from tangram_sglang.plan.file import config_hash, differences
from tangram_sglang.plan.model_config import model_config
from tangram_sglang.plan.shape import ModelShape
from tangram_sglang.score.gate import Gates

FORMAT = "tangram-gates/1"
FIELDS = (
    *("format", "tool_version", "model", "config", "config_hash"),
    *("layers", "architecture", "recipe", "corpus_hash"),
)
ADVICE = "train gates for this model (tangram train-gate)"


class Architecture(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of the gates: d and S of ``score.gate``."""

    dim: int
    sinks: int


@dataclass(frozen=True, slots=True)
class GateFile:
    """What a gate file says of its gates.

    Attributes:
        path: where it was read.
        gates: of every full-attention layer, in the types of the file.
        layers: their ids.
        architecture: d and S.
        model: name of the model.
        recipe: how they were trained.
        corpus_hash: sha256 of the texts.
        sha256: of the file.
    """

    path: Path
    gates: Gates
    layers: list[int]
    architecture: Architecture
    model: str
    recipe: dict[str, Any]
    corpus_hash: str
    sha256: str


def save_gates(
    path: Path,
    gates: Gates,
    *,
    layers: list[int],
    model: str,
    hf_config: Any,
    recipe: dict[str, Any],
    corpus_hash: str,
) -> None:
    """Write ``gates``, in bfloat16, to ``path``."""
    config = model_config(hf_config)
    architecture = Architecture(dim=gates.k.shape[2], sinks=gates.sinks.shape[2])
    metadata = {
        "format": FORMAT,
        "tool_version": __version__,
        "model": model,
        "config": _json(config),
        "config_hash": config_hash(config),
        "layers": _json(layers),
        "architecture": _json(architecture),
        "recipe": _json(recipe),
        "corpus_hash": corpus_hash,
    }
    tensors = {
        f.name: getattr(gates, f.name).to("cpu", torch.bfloat16).contiguous() for f in fields(Gates)
    }
    path.write_bytes(save(tensors, metadata))


def load_gates(path: str | Path, hf_config: Any) -> GateFile:
    """Read a gate file for a model; TangramError names the field that is wrong or differs."""
    path = Path(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise TangramError(
            f"gate file {path} cannot be read ({error.strerror}); correct TANGRAM_GATES or put the "
            "file beside the plan that names it"
        ) from None
    metadata = _metadata(raw, path)
    theirs = _field(path, metadata, "config", dict)
    if config_hash(theirs) != metadata["config_hash"]:
        raise _damaged(path, "config_hash", metadata["config_hash"], config_hash(theirs))
    if found := differences(theirs, model_config(hf_config), "in the gate file"):
        raise TangramError(
            f"gate file {path} was trained on {metadata['model']}, another model: {found}; {ADVICE}"
        )
    layers = _field(path, metadata, "layers", list[int])
    architecture = _field(path, metadata, "architecture", Architecture)
    tensors = load(raw)
    _check_tensors(path, tensors, architecture, len(layers), hf_config)
    return GateFile(
        path,
        Gates(**tensors),
        layers,
        architecture,
        metadata["model"],
        _field(path, metadata, "recipe", dict),
        metadata["corpus_hash"],
        hashlib.sha256(raw).hexdigest(),
    )


def check_layers(file: GateFile, shape: ModelShape) -> None:
    """Refuse gates of other layers or heads than ``shape`` has."""
    full = [x for x in shape.layers if x.sliding_window is None]
    ids = [x.layer_id for x in full]
    if file.layers != ids:
        raise TangramError(
            f"gate file {file.path}: layers is {file.layers}, the model's full-attention layers are "
            f"{ids}; {ADVICE}"
        )
    theirs = tuple(file.gates.bias.shape[1:])
    heads = {(x.kv_heads, x.q_heads // x.kv_heads) for x in full}
    if heads != {theirs}:
        raise TangramError(
            f"gate file {file.path}: its gates are for {theirs[0]} KV heads with {theirs[1]} query "
            f"heads each, layers of the model have {sorted(heads)}; {ADVICE}"
        )


def _metadata(raw: bytes, path: Path) -> dict[str, str]:
    try:
        deserialize(raw)
        length = int.from_bytes(raw[:8], "little")
        found = json.loads(raw[8 : 8 + length]).get("__metadata__", {})
    except SafetensorError as error:
        raise TangramError(f"gate file {path} is no safetensors file: {error}; {ADVICE}") from None
    if found.get("format") != FORMAT:
        raise TangramError(
            f"gate file {path}: format is {found.get('format')!r}, this version reads {FORMAT!r}; "
            + ADVICE
        )
    for name in FIELDS:
        if name not in found:
            raise _damaged(path, name, "missing", "present")
    return found


def _field(path: Path, metadata: dict[str, str], name: str, kind):
    try:
        return msgspec.json.decode(metadata[name], type=kind)
    except msgspec.DecodeError as error:
        raise _damaged(path, name, metadata[name], f"valid: {error}") from None


def _check_tensors(path, tensors, architecture: Architecture, layers: int, hf_config) -> None:
    kv, hidden = hf_config.num_key_value_heads, hf_config.hidden_size
    ratio = hf_config.num_attention_heads // kv
    dim, sinks = architecture.dim, architecture.sinks
    expected = {
        "q": (layers, kv, ratio, dim, hidden),
        "k": (layers, kv, dim, hidden),
        "q_norm": (layers, dim),
        "k_norm": (layers, dim),
        "sinks": (layers, kv, sinks, dim),
        "bias": (layers, kv, ratio),
    }
    if tensors.keys() != expected.keys():
        raise _damaged(path, "tensors", sorted(tensors), sorted(expected))
    for name, want in expected.items():
        x = tensors[name]
        if tuple(x.shape) != want or not x.is_floating_point():
            raise _damaged(path, name, f"{tuple(x.shape)} {x.dtype}", f"{want} of a float type")
        if not x.isfinite().all():
            raise _damaged(path, name, "not finite", "finite")


def _damaged(path: Path, field: str, found, expected) -> TangramError:
    return TangramError(
        f"gate file {path}: {field} is {found}, expected {expected}; the file is damaged: {ADVICE}"
    )


def _json(value) -> str:
    return msgspec.json.encode(value, order="deterministic").decode()
