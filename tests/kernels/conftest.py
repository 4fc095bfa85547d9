"""Kernels run compiled where there is a GPU and in Triton's interpreter elsewhere.

The interpreter must be chosen before Triton is first imported.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
