"""A KVLayout for a Hugging Face model, as a server would build it from the same settings."""

from tangram_sglang.plan.layout import KVLayout
from tangram_sglang.plan.shape import LayerShape, ModelShape
from tangram_sglang.plan.window import WindowRule
from tests.reference.model import sliding_window


def model_shape(model) -> ModelShape:
    """Attention layers of ``model`` on one rank."""
    config = model.config
    return ModelShape(
        tuple(
            LayerShape(
                layer_id=i,
                q_heads=config.num_attention_heads,
                kv_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                sliding_window=sliding_window(config, i),
                scaling=layer.self_attn.scaling,
            )
            for i, layer in enumerate(model.model.layers)
        )
    )


def layout_for(
    model,
    *,
    retention: float,
    budgets=None,
    window=512,
    recent=256,
    page=16,
    sinks=4,
    group_heads=4,
    grouping="global",
) -> KVLayout:
    """The layout; ``budgets`` is one share a head in global head order, uniform by default."""
    shape = model_shape(model)
    if budgets is None:
        budgets = [retention] * len(shape.full_heads)
    return KVLayout.build(
        shape,
        WindowRule(window, recent, page, sinks),
        budgets=budgets,
        retention=retention,
        per_group=group_heads,
        grouping=grouping,
        max_tokens=model.config.max_position_embeddings,
    )
