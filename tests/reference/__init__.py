"""A slow model with a compressed past: docs/design.md read literally, on Hugging Face modules.

Shares no code with what serves: it takes W, R, the sinks, the kept counts and the heads of each
group from a KVLayout as plain numbers, and does everything else by itself.
"""

from tests.reference.layout import layout_for, model_shape
from tests.reference.run import CompressedRun

__all__ = ["CompressedRun", "layout_for", "model_shape"]
