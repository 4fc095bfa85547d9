"""Makes a model with dummy weights depend on what it attends to.

SGLang's ``--load-format dummy`` draws every weight, the norms' too, from +-0.001. Queries, keys and
values are then near zero beside the embeddings, and attention that is wrong changes no token: such a
model can be timed and cannot be checked. The weights of its norms decide that alone, and they are few:
half a megabyte for an 8B model, given to a server that runs by ``/update_weights_from_disk``.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.server_api import post

DUMMY_STD = 1e-3 / 3**0.5  # of a uniform distribution over +-0.001
# standard deviation of queries and keys (where no norm of their own follows), of the MLP's inner
# values and of the logits: attention must prefer some tokens, and weigh as much as the MLP does
QUERY, INNER, LOGIT = 1.5, 0.5, 2.5


def norm_weights(config: dict) -> dict[str, torch.Tensor]:
    """Weights of all norms of a Llama or Qwen3 model whose other weights are SGLang's dummies."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    unit = 1 / (DUMMY_STD * hidden**0.5)
    found = {"model.norm.weight": torch.full((hidden,), LOGIT * unit)}
    for i in range(layers):
        layer = f"model.layers.{i}"
        found[f"{layer}.input_layernorm.weight"] = torch.full((hidden,), QUERY * unit)
        found[f"{layer}.post_attention_layernorm.weight"] = torch.full((hidden,), INNER * unit)
        if config["model_type"] == "qwen3":
            for x in "qk":
                weight = torch.full((config["head_dim"],), QUERY)
                found[f"{layer}.self_attn.{x}_norm.weight"] = weight
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
