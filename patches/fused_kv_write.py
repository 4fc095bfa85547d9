"""enable_fused_set_kv_buffer: no kernel but ours may write K and V.

Some models write them from the RoPE kernel into a layer's buffer, which the pool does not have.
"""

from tangram_sglang.patches.hook import Hook, selected


def _enable_fused_set_kv_buffer(original, forward_batch):
    return False if selected() else original(forward_batch)


HOOK = Hook(
    "sglang.srt.models.utils.enable_fused_set_kv_buffer",
    ("forward_batch",),
    _enable_fused_set_kv_buffer,
    "the choice is a function, not an option",
)
