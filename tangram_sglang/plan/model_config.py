"""The fields of a Hugging Face config that decide what a model's keys look like."""

from typing import Any

import msgspec

FIELDS = (
    "architectures",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "sliding_window",
)


def model_config(hf_config: Any) -> dict[str, int | float | str | list[str] | None]:
    """Those fields of ``hf_config``, with rope_theta from wherever its version keeps it."""
    config = {name: getattr(hf_config, name, None) for name in FIELDS}
    rope = {**(getattr(hf_config, "rope_parameters", None) or {})}
    rope |= getattr(hf_config, "rope_scaling", None) or {}
    rope["partial_rotary_factor"] = getattr(hf_config, "partial_rotary_factor", None)
    config["rope"] = msgspec.json.encode(_canonical(rope), order="deterministic").decode()
    theta = getattr(hf_config, "rope_theta", None)
    parameters = getattr(hf_config, "rope_parameters", None)
    if theta is None and isinstance(parameters, dict):
        theta = parameters.get("rope_theta")
    config["rope_theta"] = None if theta is None else float(theta)
    return config


def _canonical(rope: dict) -> dict:
    """RoPE parameters without what is empty, said twice (SGLang adds ``type``) or said elsewhere."""
    return {
        name: _canonical(value) if isinstance(value, dict) else value
        for name, value in rope.items()
        if value is not None and name not in ("type", "rope_theta")
    }
