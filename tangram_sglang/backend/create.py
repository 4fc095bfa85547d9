"""Builds the attention backend last of all pools, after proving that all of them are ours."""

import logging
from pathlib import Path

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from tangram_sglang.backend.allocator import TangramAllocator
from tangram_sglang.backend.attention import TangramAttentionBackend
from tangram_sglang.backend.build import startup_line
from tangram_sglang.backend.drift import DriftWatch
from tangram_sglang.backend.gates import GateScores, attach_gates
from tangram_sglang.backend.kv_pool import TangramKVPool
from tangram_sglang.backend.req_pool import TangramReqToTokenPool
from tangram_sglang.errors import TangramError
from tangram_sglang.patches.hooks import check_hooks
from tangram_sglang.plan.serving import ServingPlan
from tangram_sglang.settings import observe_path

logger = logging.getLogger(__name__)


def create_backend(model_runner) -> AttentionBackend:
    """The backend of this process; TangramError names what is not in place."""
    check_hooks()
    for name, expected in (
        ("req_to_token_pool", TangramReqToTokenPool),
        ("token_to_kv_pool", TangramKVPool),
        ("token_to_kv_pool_allocator", TangramAllocator),
    ):
        found = getattr(model_runner, name)
        if not isinstance(found, expected):
            raise TangramError(
                f"SGLang built {type(found).__name__} as {name}, expected {expected.__name__}: "
                "another plugin replaced it; remove that plugin or choose another backend"
            )
    pool = model_runner.token_to_kv_pool
    logger.info(startup_line(pool))
    plan = pool.plan
    if plan.layout.retention_held > plan.retention + plan.layout.retention_step:
        logger.warning(
            "tangram: holds %.4f of the bytes of sealed windows, %.4f was asked: every group keeps a "
            "page at least and padding columns count; lower TANGRAM_PAGE or TANGRAM_GROUP_HEADS",
            plan.layout.retention_held,
            plan.retention,
        )
    if not plan.layout.rule.shares:
        logger.warning(
            "tangram: TANGRAM_RESERVE=uncompressed holds every prompt whole until it ends and shares no "
            "prefixes; an experiment to compare with, not for production"
        )
    watcher, gates = _watcher(model_runner), _gates(model_runner, plan)
    if model_runner.device == "cpu":
        return TangramAttentionBackend(model_runner, watcher, gates)
    if torch.version.hip is not None:
        raise TangramError(
            "tangram's kernels are made for NVIDIA GPUs, this torch is built for AMD ones: choose "
            "another --attention-backend"
        )
    from tangram_sglang.backend.cuda_attention import TangramCudaBackend

    return TangramCudaBackend(model_runner, watcher, gates)


def _gates(model_runner, plan: ServingPlan) -> GateScores | None:
    if plan.gates is None:
        return None
    arguments = model_runner.server_args
    rows = max(arguments.chunked_prefill_size or 0, model_runner.req_to_token_pool.size)
    return attach_gates(model_runner.model, plan.gates, rows)


def _watcher(model_runner):
    """Who sees windows as they are sealed: calibration, the watch for drift, or nobody."""
    pool, path = model_runner.token_to_kv_pool, observe_path()
    if pool.plan.drift is not None:
        if path is not None:
            raise TangramError("TANGRAM_DRIFT and TANGRAM_OBSERVE exclude each other; unset one")
        pool.drift = DriftWatch(pool.plan.drift, pool.plan.layout, pool.device)
        return pool.drift
    return None if path is None else _observer(model_runner, path)


def _observer(model_runner, path: str):
    from tangram_sglang.backend.model_shape import model_shape
    from tangram_sglang.backend.projections import output_projections
    from tangram_sglang.backend.rope import rotary_frequencies
    from tangram_sglang.calib.observer import Observer

    pool = model_runner.token_to_kv_pool
    layout = pool.plan.layout
    if layout.compresses:
        raise TangramError("TANGRAM_OBSERVE needs every token: set TANGRAM_RETENTION=1.0")
    model = model_runner.model
    return Observer(
        model_shape(model),
        rotary_frequencies(model),
        layout.rule,
        Path(path),
        projections=lambda: output_projections(model),
        device=pool.device,
    )
