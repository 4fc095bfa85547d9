"""Steps in SGLang's argument resolution: implied flags and early refusals.

They run in the launching process, before any weights are read, so that a mistake costs seconds.
"""

import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from sglang.srt.arg_groups import model_hook
from sglang.srt.arg_groups.model_override_base import model_config_of, resolved_view
from sglang.srt.arg_groups.overrides import declare_resolution
from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

from tangram_sglang.backend.refusals import refuse_unsupported
from tangram_sglang.errors import TangramError
from tangram_sglang.plan.serving import read_gates, read_plan
from tangram_sglang.settings import Settings

logger = logging.getLogger(__name__)

NAME = "tangram"


def register_resolution() -> None:
    """Add our steps; each leaves servers with another backend alone."""
    register_resolution_hook("handle_missing_default_values")(_before_model)
    register_resolution_hook("handle_model_specific_adjustments")(_vouch)
    register_resolution_hook("handle_cache_compatibility")(_choose_cache)
    register_resolution_hook("handle_other_validations")(_validate)


def _selected(server_args: Any) -> bool:
    args = resolved_view(server_args)
    return NAME in (
        args.attention_backend,
        args.prefill_attention_backend,
        args.decode_attention_backend,
    )


def _before_model(server_args: Any, previous) -> None:
    if _selected(server_args):
        Settings.from_env()
        # window layers are a kind of our own pool, not SGLang's second pool
        declare_resolution(server_args, NAME, disable_hybrid_swa_memory=True)
    previous(server_args)


def _vouch(server_args: Any, previous) -> None:
    """Pass SGLang's list of backends with attention sinks, which names no plugin's.

    Its adjustments for the model, and nothing else, are told of triton, which is on the list; what
    they read beside the list they read from the arguments themselves.
    """
    told = nullcontext()
    if _selected(server_args) and _has_list(server_args):
        told = patch.object(model_hook, "attention_backends_of", lambda _: ("triton", "triton"))
    with told:
        previous(server_args)


def _has_list(server_args: Any) -> bool:
    # SGLang asks the first one
    architectures = model_config_of(server_args).hf_config.architectures or ()
    return architectures[:1] == ["GptOssForCausalLM"]


def _choose_cache(server_args: Any, previous) -> None:
    previous(server_args)
    if _selected(server_args) and resolved_view(server_args).radix_cache_backend is None:
        declare_resolution(server_args, NAME, radix_cache_backend=NAME)


def _validate(server_args: Any, previous) -> None:
    previous(server_args)
    if _selected(server_args):
        refuse_unsupported(resolved_view(server_args))
        settings, config = Settings.from_env(), model_config_of(server_args).hf_text_config
        if settings.drift and not resolved_view(server_args).enable_metrics:
            raise TangramError(
                f"TANGRAM_DRIFT={settings.drift} shows up as metrics only: pass --enable-metrics or "
                "unset it"
            )
        plan = read_plan(settings, config)
        read_gates(settings, plan, config)
        served = Path(resolved_view(server_args).model_path).name
        if plan is not None and plan.model.id.lower() != served.lower():
            logger.warning(
                "tangram: the plan was calibrated on %s, the model served is called %s; their "
                "shapes agree, their heads may not",
                plan.model.id,
                served,
            )
