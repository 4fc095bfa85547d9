"""The forward pass of a Hugging Face model, layer by layer, with attention left to the caller.

Knows nothing of compression. One sequence at a time, so no tensor has a batch dimension.
"""

from collections.abc import Callable

import torch
from transformers.models.gpt_oss.modeling_gpt_oss import apply_rotary_pos_emb as rotate_gpt_oss
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

# (layer, q [HQ, T, D], k [H, T, D], v [H, T, D]) -> attention output [HQ, T, D]
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def final_hidden(model, token_ids: list[int], start: int, attend: Attend) -> torch.Tensor:
    """Hidden states before lm_head, [T, hidden], of tokens at positions ``start``, ``start + 1``...

    ``attend`` is called once a layer, in order, with queries and keys after RoPE.
    """
    decoder = model.model
    block = _BLOCKS[model.config.model_type]
    positions = torch.arange(start, start + len(token_ids))
    x = decoder.embed_tokens(torch.tensor(token_ids))
    for i, layer in enumerate(decoder.layers):
        x = block(decoder, layer, i, x, positions, attend)
    return decoder.norm(x)


def sliding_window(config, layer: int) -> int | None:
    """Tokens a query of ``layer`` sees, itself included; None for full attention."""
    if config.model_type == "llama" or config.layer_types[layer] == "full_attention":
        return None
    return config.sliding_window


def frequencies(model) -> torch.Tensor:
    """RoPE of full-attention layers, radians per position, [rotary_dim / 2] fp64."""
    rotary = model.model.rotary_emb
    gemma = model.config.model_type == "gemma3_text"
    return (rotary.full_attention_inv_freq if gemma else rotary.inv_freq).double()


def _llama_block(decoder, layer, i, x, positions, attend):
    cos, sin = decoder.rotary_emb(x, positions[None])
    attention = layer.self_attn
    q, k, v = _project(attention, layer.input_layernorm(x))
    if decoder.config.model_type == "qwen3":
        q, k = attention.q_norm(q), attention.k_norm(k)
    q, k = _rotate(q, k, cos, sin)
    x = x + attention.o_proj(_concat_heads(attend(i, q, k, v)))
    return x + layer.mlp(layer.post_attention_layernorm(x))


def _gemma3_block(decoder, layer, i, x, positions, attend):
    cos, sin = decoder.rotary_emb(x, positions[None], decoder.config.layer_types[i])
    attention = layer.self_attn
    q, k, v = _project(attention, layer.input_layernorm(x))
    q, k = _rotate(attention.q_norm(q), attention.k_norm(k), cos, sin)
    out = attention.o_proj(_concat_heads(attend(i, q, k, v)))
    x = x + layer.post_attention_layernorm(out)
    out = layer.mlp(layer.pre_feedforward_layernorm(x))
    return x + layer.post_feedforward_layernorm(out)


def _gpt_oss_block(decoder, layer, i, x, positions, attend):
    cos, sin = decoder.rotary_emb(x, positions[None])
    attention = layer.self_attn
    q, k, v = _project(attention, layer.input_layernorm(x))
    q, k = rotate_gpt_oss(q[None], k[None], cos, sin)
    x = x + attention.o_proj(_concat_heads(attend(i, q[0], k[0], v)))
    return x + layer.mlp(layer.post_attention_layernorm(x)[None])[0][0]


_BLOCKS = {
    "llama": _llama_block,
    "qwen3": _llama_block,
    "gemma3_text": _gemma3_block,
    "gpt_oss": _gpt_oss_block,
}


def _project(attention, x):
    """[T, hidden] -> q [HQ, T, D], k and v [H, T, D]."""
    split = (-1, attention.head_dim)
    return (
        attention.q_proj(x).unflatten(-1, split).transpose(0, 1),
        attention.k_proj(x).unflatten(-1, split).transpose(0, 1),
        attention.v_proj(x).unflatten(-1, split).transpose(0, 1),
    )


def _rotate(q, k, cos, sin):
    q, k = apply_rotary_pos_emb(q[None], k[None], cos, sin)
    return q[0], k[0]


def _concat_heads(out):
    return out.transpose(0, 1).flatten(1)
