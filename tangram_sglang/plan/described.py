"""The model's shape and the layout as a plan file alone describes them, without the model."""

from tangram_sglang.errors import TangramError
from tangram_sglang.plan.file import PlanFile
from tangram_sglang.plan.layout import KVLayout
from tangram_sglang.plan.shape import LayerShape, ModelShape
from tangram_sglang.plan.window import WindowRule
from tangram_sglang.score import create_scorer
from tangram_sglang.settings import Settings


def plan_shape(plan: PlanFile) -> ModelShape:
    """The full-attention layers; a plan says nothing of layers with a sliding window."""
    config = plan.model.config
    q_heads, kv_heads = config.get("num_attention_heads"), len(plan.budgets) // len(plan.layers)
    dim = config.get("head_dim")
    if dim is None and q_heads and config.get("hidden_size"):
        dim = int(config["hidden_size"]) // int(q_heads)
    if not q_heads or not dim or int(q_heads) % kv_heads:
        raise TangramError(
            f"the plan of {plan.model.id} gives {q_heads} attention heads of size {dim} for "
            f"{kv_heads} KV heads a layer; expected a multiple of {kv_heads}: calibrate again"
        )
    layers = (
        LayerShape(layer, int(q_heads), kv_heads, int(dim), None, int(dim) ** -0.5)
        for layer in plan.layers
    )
    return ModelShape(tuple(layers))


def plan_layout(plan: PlanFile, settings: Settings, max_tokens: int) -> KVLayout:
    """What a server with these settings would hold in the plan's layers."""
    retention = settings.retention or plan.calibration.retention
    window = settings.window or plan.calibration.window
    shape = plan_shape(plan)
    layout = KVLayout.build(
        shape,
        WindowRule(window, settings.recent, settings.page, settings.sinks),
        budgets=plan.budgets,
        retention=retention,
        per_group=settings.group_heads,
        grouping=settings.grouping,
        max_tokens=max_tokens,
    )
    if layout.compresses:
        scorer = create_scorer(settings.scorer or plan.selection.scorer)
        if "q_window" in scorer.needs:
            layout = layout.with_queries(shape, scorer.q_window(window))
        if "hidden" in scorer.needs:
            layout = layout.with_scores()
    return layout
