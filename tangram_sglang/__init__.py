"""Attention backend for SGLang that holds a static, calibrated share of each head's KV cache.

Importing the package imports nothing else: SGLang loads it in each of its processes.
"""

__version__ = "0.1.0"
