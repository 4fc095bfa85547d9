"""Makes a model with dummy weights depend on what it attends to.

SGLang's ``--load-format dummy`` draws every weight, the norms' too, from +-0.001. Queries, keys and
values are then near zero beside the embeddings, and attention that is wrong changes no token: such a
model can be timed and cannot be checked. The weights of its norms decide that alone, and they are few:
half a megabyte for an 8B model, given to a server that runs by ``/update_weights_from_disk``. They have
random signs: SGLang draws the same dummies for every layer, and equal layers, one after the other,
forget what they were given.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.server_api import post

DUMMY_STD = 1e-3 / 3**0.5  # of a uniform distribution over +-0.001
# standard deviation of queries and keys (where no norm of their own follows), of the MLP's inner
# values and of the logits: attention must prefer some tokens, and weigh as much as the MLP does
QUERY, INNER, LOGIT = 1.5, 0.7, 2.5


def norm_weights(config: dict) -> dict[str, torch.Tensor]:
    """Weights of all norms of a Llama or Qwen3 model whose other weights are SGLang's dummies."""
    hidden, generator = config["hidden_size"], torch.Generator().manual_seed(0)
    unit = 1 / (DUMMY_STD * hidden**0.5)

    def signed(size: int, scale: float) -> torch.Tensor:
        return scale * (2.0 * torch.randint(2, (size,), generator=generator) - 1.0)

    found = {"model.norm.weight": signed(hidden, LOGIT * unit)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        # the embeddings are so small that the norm's epsilon shrinks them
        first = (1 + config["rms_norm_eps"] / DUMMY_STD**2) ** 0.5 if i == 0 else 1.0
        found[f"{layer}.input_layernorm.weight"] = signed(hidden, first * QUERY * unit)
        found[f"{layer}.post_attention_layernorm.weight"] = signed(hidden, INNER * unit)
        if config["model_type"] == "qwen3":
            for x in "qk":
                found[f"{layer}.self_attn.{x}_norm.weight"] = signed(config["head_dim"], QUERY)
    return found


def save_norms(model: Path, folder: Path) -> Path:
    """Write a folder that ``/update_weights_from_disk`` takes; ``folder`` must not be the model's."""
    config = json.loads((model / "config.json").read_text())
    if config["model_type"] not in ("llama", "qwen3"):
        raise ValueError(f"model type {config['model_type']}: expected llama or qwen3")
    folder.mkdir(parents=True, exist_ok=True)
    save_file(norm_weights(config), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def enliven(url: str, norms: Path) -> None:
    """Give a server the norms' weights; its prefix cache is emptied."""
    answer = post(
        f"{url}/update_weights_from_disk", {"model_path": str(norms), "load_format": "auto"}
    )
    if not answer["success"]:
        raise RuntimeError(f"the server refused the norms' weights: {answer['message']}")
