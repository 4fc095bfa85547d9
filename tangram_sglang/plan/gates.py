"""The gate file: trained gates of one model in one safetensors, with what they were made for and from.

Its metadata is one JSON text, ``Description``: with several entries safetensors would write them in
another order each time, and the same training gives the same file.
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
from tangram_sglang.plan.file import ModelSpec, config_hash, differences
from tangram_sglang.plan.model_config import model_config
from tangram_sglang.plan.shape import ModelShape
from tangram_sglang.score.gate import Gates

FORMAT = "tangram-gates/1"
ENTRY = "tangram"
ADVICE = "train gates for this model (tangram train-gate)"


class Architecture(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of the gates: d and S of ``score.gate``."""

    dim: int
    sinks: int


class Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a gate file says of its gates.

    Attributes:
        tool_version: version of tangram_sglang that wrote the file.
        model: as in a plan.
        layers: ids of the full-attention layers.
        architecture: sizes of the gates.
        recipe: how they were trained.
        corpus_hash: sha256 of the texts.
    """

    format: str
    tool_version: str
    model: ModelSpec
    layers: list[int]
    architecture: Architecture
    recipe: dict[str, Any]
    corpus_hash: str


@dataclass(frozen=True, slots=True)
class GateFile:
    """A gate file that was read.

    Attributes:
        path: where.
        gates: of every full-attention layer, in the types of the file.
        about: what the file says of them.
        sha256: of the file.
    """

    path: Path
    gates: Gates
    about: Description
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
    about = Description(
        format=FORMAT,
        tool_version=__version__,
        model=ModelSpec(model, config, config_hash(config)),
        layers=layers,
        architecture=Architecture(dim=gates.k.shape[2], sinks=gates.sinks.shape[2]),
        recipe=recipe,
        corpus_hash=corpus_hash,
    )
    tensors = {
        f.name: getattr(gates, f.name).to("cpu", torch.bfloat16).contiguous() for f in fields(Gates)
    }
    path.write_bytes(save(tensors, {ENTRY: msgspec.json.encode(about).decode()}))


def load_gates(path: str | Path, hf_config: Any) -> GateFile:
    """Read a gate file for a model; TangramError names the field that is wrong or differs."""
    path = Path(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise TangramError(
            f"gate file {path} cannot be read ({error.strerror}); correct its name, or put it "
            "beside the plan that names it"
        ) from None
    about = _description(raw, path)
    model = about.model
    if config_hash(model.config) != model.config_hash:
        raise _damaged(path, "model.config_hash", model.config_hash, config_hash(model.config))
    if found := differences(model.config, model_config(hf_config), "in the gate file"):
        raise TangramError(
            f"gate file {path} was trained on {model.id}, another model: {found}; {ADVICE}"
        )
    tensors = load(raw)
    _check_tensors(path, tensors, about, hf_config)
    return GateFile(path, Gates(**tensors), about, hashlib.sha256(raw).hexdigest())


def check_layers(file: GateFile, shape: ModelShape) -> None:
    """Refuse gates of other layers or heads than ``shape`` has."""
    full = [x for x in shape.layers if x.sliding_window is None]
    ids = [x.layer_id for x in full]
    if file.about.layers != ids:
        raise TangramError(
            f"gate file {file.path}: layers is {file.about.layers}, the model's full-attention layers are "
            f"{ids}; {ADVICE}"
        )
    theirs = tuple(file.gates.bias.shape[1:])
    heads = {(x.kv_heads, x.q_heads // x.kv_heads) for x in full}
    if heads != {theirs}:
        raise TangramError(
            f"gate file {file.path}: its gates are for {theirs[0]} KV heads with {theirs[1]} query "
            f"heads each, layers of the model have {sorted(heads)}; {ADVICE}"
        )


def _description(raw: bytes, path: Path) -> Description:
    try:
        deserialize(raw)
    except SafetensorError as error:
        raise TangramError(f"gate file {path} is no safetensors file: {error}; {ADVICE}") from None
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    text = header.get("__metadata__", {}).get(ENTRY, "{}")
    try:
        found = msgspec.json.decode(text)
        written = found.get("format") if isinstance(found, dict) else None
        if written != FORMAT:
            raise TangramError(
                f"gate file {path}: format is {written!r}, this version reads {FORMAT!r}; {ADVICE}"
            )
        return msgspec.json.decode(text, type=Description)
    except msgspec.DecodeError as error:
        raise TangramError(
            f"gate file {path}: its metadata are damaged: {error}; {ADVICE}"
        ) from None


def _check_tensors(path: Path, tensors, about: Description, hf_config) -> None:
    kv, hidden = hf_config.num_key_value_heads, hf_config.hidden_size
    ratio = hf_config.num_attention_heads // kv
    layers, dim, sinks = len(about.layers), about.architecture.dim, about.architecture.sinks
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
