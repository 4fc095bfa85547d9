"""SGLang's kits, imported from the installed wheel and nothing changed in them.

Two of them import, through SGLang's vision evaluations, the library `datasets`, which no test here
calls and which is not installed: for the time of the import an empty module stands in for it.
"""

import importlib.util
import sys
from types import ModuleType


class _Absent(ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _not_installed


def _not_installed(*args, **kwargs):
    raise ModuleNotFoundError("the library `datasets` is not installed: no kit run here needs it")


_stands_in = importlib.util.find_spec("datasets") is None
if _stands_in:
    sys.modules["datasets"] = _Absent("datasets")
try:
    from sglang.test import kl_test_utils
    from sglang.test.kits import cache_hit_kit, radix_cache_server_kit
    from sglang.test.kits.abort_timeout_kit import (
        AbortAllMixin,
        RunningTimeoutTwoWaveMixin,
        WaitingTimeoutMixin,
    )
    from sglang.test.kits.basic_api_contract_kit import BasicAPIContractMixin
    from sglang.test.kits.basic_decode_correctness_kit import BasicDecodeCorrectnessMixin
    from sglang.test.kits.basic_scheduler_stress_kit import BasicSchedulerStressMixin
    from sglang.test.kits.ebnf_constrained_kit import EBNFConstrainedMixin
    from sglang.test.kits.json_constrained_kit import JSONConstrainedMixin
    from sglang.test.kits.json_mode_kit import JSONModeMixin
    from sglang.test.kits.kl_divergence_kit import KLDivergenceMixin
    from sglang.test.kits.pause_generation_kit import PauseResumeInPlaceMixin
    from sglang.test.kits.regex_constrained_kit import RegexConstrainedMixin
    from sglang.test.kits.spec_server_kits import SpecLogprobKit, SpecSamplingMaskKit
    from sglang.test.kits.unified_radix_cache_kit import UnifiedRadixTreeTestMixin
    from sglang.test.kl_multiturn_utils import default_decode_cache_assert
finally:
    if _stands_in:
        del sys.modules["datasets"]

__all__ = [
    "AbortAllMixin",
    "BasicAPIContractMixin",
    "BasicDecodeCorrectnessMixin",
    "BasicSchedulerStressMixin",
    "EBNFConstrainedMixin",
    "JSONConstrainedMixin",
    "JSONModeMixin",
    "KLDivergenceMixin",
    "PauseResumeInPlaceMixin",
    "RegexConstrainedMixin",
    "RunningTimeoutTwoWaveMixin",
    "SpecLogprobKit",
    "SpecSamplingMaskKit",
    "UnifiedRadixTreeTestMixin",
    "WaitingTimeoutMixin",
    "cache_hit_kit",
    "default_decode_cache_assert",
    "kl_test_utils",
    "radix_cache_server_kit",
]
