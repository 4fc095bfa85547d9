"""Import-only stand-in for torchvision.

SGLang imports torchvision at module level, for its multimodal processors, even when the model is
text-only; the real one has no build beside every CPU build of torch. Every name below this package
can be imported, and calling anything fails with a message that names this file.
"""

import enum
import importlib.machinery
import sys
import types

__version__ = "0.0.0+stub"


class InterpolationMode(enum.Enum):
    """Its members are read, not called, while SGLang's processors are imported."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class _Placeholder:
    def __init__(self, *args, **kwargs):
        # a subclass or a module-level instance may be made at import; only using it is an error
        pass

    def __call__(self, *args, **kwargs):
        raise RuntimeError(
            f"{__file__} stands in for torchvision and does no image work; "
            "install torchvision to serve multimodal models"
        )


class _StubModule(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return InterpolationMode if name == "InterpolationMode" else _Placeholder()


class _StubFinder:
    """Finds every submodule of torchvision, and nothing else."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.startswith("torchvision."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _StubModule(spec.name)

    def exec_module(self, module):
        module.__path__ = []


sys.meta_path.insert(0, _StubFinder())
