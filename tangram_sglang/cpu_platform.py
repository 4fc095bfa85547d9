"""An opt-in SGLang platform for machines without a GPU (``TANGRAM_CPU_PLATFORM=1``).

SGLang's own CPU path needs AMX instructions or the sgl-kernel package; this platform runs its
plain PyTorch layers anywhere. It never stands in the way of a GPU.
"""

from tangram_sglang.settings import cpu_platform_requested


def activate() -> str | None:
    """Entry point ``sglang.srt.platforms``: the platform class, or None to stay out."""
    if not cpu_platform_requested():
        return None
    import torch

    if torch.cuda.is_available():
        return None
    return "tangram_sglang.backend.cpu:CpuPlatform"
