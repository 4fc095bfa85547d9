"""Reads the attention layers off a loaded SGLang model, refusing by name what is unsupported."""

from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from torch import nn

from tangram_sglang.errors import TangramError
from tangram_sglang.plan.shape import LayerShape, ModelShape


def model_shape(model: nn.Module) -> ModelShape:
    """The RadixAttention layers of ``model``, in layer order."""
    layers = [m for m in model.modules() if isinstance(m, RadixAttention)]
    layers.sort(key=lambda layer: layer.layer_id)
    ids = [layer.layer_id for layer in layers]
    if len(set(ids)) < len(ids):
        raise TangramError(
            "tangram does not support models whose layers share one KV cache; serve it with another "
            "--attention-backend"
        )
    return ModelShape(tuple(_layer_shape(layer) for layer in layers))


def _layer_shape(layer: RadixAttention) -> LayerShape:
    unsupported = {
        "cross attention": layer.is_cross_attention,
        "attention that is not causal": layer.attn_type != AttentionType.DECODER,
        "a logit soft cap": layer.logit_cap > 0,
        "different head sizes of K and V (MLA)": layer.qk_head_dim != layer.v_head_dim,
        "a length-dependent temperature": layer.xai_temperature_len > 0,
        "interleaved RoPE (iRoPE)": layer.use_irope,
    }
    for name, present in unsupported.items():
        if present:
            raise TangramError(
                f"tangram does not support {name}, which layer {layer.layer_id} of this model has; "
                "serve it with another --attention-backend"
            )
    # SGLang counts the tokens before a query, we count the query too
    window = layer.sliding_window_size
    return LayerShape(
        layer.layer_id,
        layer.tp_q_head_num,
        layer.tp_k_head_num,
        layer.head_dim,
        window + 1 if window is not None and window >= 0 else None,
        layer.scaling,
    )
