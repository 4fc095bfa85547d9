"""Builds our plan, pools and backend inside SGLang's own building sequence.

SGLang asks, in this order, for: the pool's size, request rows, page pool, allocator, attention
backend, prefix cache. ``kvc`` is its KVCacheConfigurator, the one object all of the first four
see; it takes no attributes, so the plan is built at the first question and rides on the model.
"""

from functools import partial
from typing import Any

import numpy as np
from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig, MemoryPoolConfigurator
from sglang.srt.utils.common import get_available_gpu_memory

from tangram_sglang.backend.kv_pool import TangramKVPool
from tangram_sglang.backend.model_shape import model_shape
from tangram_sglang.backend.req_pool import TangramReqToTokenPool
from tangram_sglang.backend.rope import rotary_frequencies
from tangram_sglang.errors import TangramError
from tangram_sglang.plan.layout import KVLayout
from tangram_sglang.plan.serving import ServingPlan, serving_plan
from tangram_sglang.settings import Settings


def plan_of(kvc: Any) -> ServingPlan:
    """The plan this process serves with."""
    plan = getattr(kvc.model, "tangram_plan", None)
    if plan is None:
        if kvc.kv_cache_dtype != kvc.model_dtype:
            raise TangramError(
                f"the pool holds K and V in the model's type {kvc.model_dtype}, "
                f"not {kvc.kv_cache_dtype}; drop --kv-cache-dtype"
            )
        kvc.model.tangram_plan = plan = serving_plan(
            Settings.from_env(),
            kvc.model_config.hf_text_config,
            model_shape(kvc.model),
            kvc.model_config.context_len,
            kvc.device,
            partial(rotary_frequencies, kvc.model),
        )
    return plan


class TangramPoolConfigurator(MemoryPoolConfigurator):
    """Bytes to capacity in true tokens: the longest request that the pages carry to its end."""

    def __init__(self, kvc: Any):
        self._kvc = kvc
        self._layout = plan_of(kvc).layout
        self._memory = int(get_available_gpu_memory(kvc.device, kvc.gpu_id) * (1 << 30))
        self._page_bytes = self._layout.page_bytes(kvc.kv_cache_dtype.itemsize)
        self._spare = spare_pages(self._layout, kvc.device)

    def calculate_pool_sizes(self, available_bytes: int, page_size: int) -> MemoryPoolConfig:
        budget = Settings.from_env().pool_bytes
        if budget is None:
            budget = available_bytes - self._table_bytes(available_bytes)
        if budget > self._memory:
            raise TangramError(
                f"TANGRAM_POOL_BYTES={budget} exceeds the {self._memory} bytes of free memory; "
                "lower or unset it"
            )
        tokens = self._capacity(budget)
        if tokens < 1:
            beside = f"beside {self._spare} spare pages " if self._spare else ""
            # where prompts are held whole, spare pages grow with the longest one
            less = "" if self._layout.rule.shares else ", or lower --context-length"
            raise TangramError(
                f"{budget} bytes hold no request: {beside}one token takes {self._layout.pages(1)} "
                f"pages of {self._page_bytes} bytes; raise TANGRAM_POOL_BYTES or "
                f"--mem-fraction-static{less}"
            )
        return MemoryPoolConfig(max_total_num_tokens=tokens)

    def _capacity(self, budget: int) -> int:
        """True tokens in ``budget`` bytes of pages."""
        # page 0 is the dummy
        return self._layout.capacity(budget // self._page_bytes - 1 - self._spare)

    def _table_bytes(self, available_bytes: int) -> int:
        """Bytes of the page table: a row per request, and the dummy row 0."""
        rows = self._kvc.resolve_max_num_reqs(self._capacity(available_bytes)) + 1
        return rows * self._layout.table_slots * np.dtype(np.int32).itemsize

    def calculate_pool_sizes_from_max_tokens(
        self, max_total_num_tokens: int, page_size: int
    ) -> MemoryPoolConfig:
        return MemoryPoolConfig(max_total_num_tokens=max_total_num_tokens)


def spare_pages(layout: KVLayout, device: str) -> int:
    """Pages beside the books: what a row holds raw on a GPU, none on a CPU, which copies elsewhere.

    Sliding windows included: a chunk in a full pool gets the pages of the tokens it slides past. Queries
    too: they are given back with the windows that they score. And no more than a step can take in place
    of them: tails are long where prompts are held whole.
    """
    if device == "cpu":
        return 0
    full, rule = slice(layout.num_full), layout.rule
    tails = layout.ring_slots.copy()
    taken = layout.sealed_slots[full] + rule.pages(rule.window + rule.recent)
    tails[full] = np.minimum(tails[full], taken)
    return int(tails.sum()) + layout.queries.slots * layout.queries.pages


def build_req_pool(kvc: Any, rows: int, extra_tokens: int) -> TangramReqToTokenPool:
    """Request rows; ``extra_tokens`` is what SGLang adds to the context length."""
    return TangramReqToTokenPool(
        size=rows,
        max_context_len=kvc.model_config.context_len + extra_tokens,
        device=kvc.device,
        enable_memory_saver=False,
    )


def build_kv_pool(kvc: Any, max_tokens: int, req_pool: TangramReqToTokenPool) -> TangramKVPool:
    """The page pool, with its rows bound to SGLang's."""
    plan = plan_of(kvc)
    pool = TangramKVPool(
        plan,
        size=max_tokens,
        num_pages=plan.layout.prompt_pages(max_tokens),
        num_spare=spare_pages(plan.layout, kvc.device),
        max_rows=req_pool.size,
        dtype=kvc.kv_cache_dtype,
        device=kvc.device,
        layer_num=kvc.layer_info.num_effective_layers,
        enable_memory_saver=False,
    )
    req_pool.bind(pool.rows)
    return pool


def startup_line(pool: TangramKVPool) -> str:
    """One line that says what is in force, with figures as held and not as asked."""
    plan, layout, rule = pool.plan, pool.plan.layout, pool.plan.layout.rule
    queries, held = layout.queries, ""
    if queries.tokens:
        most = queries.slots * queries.pages * layout.page_bytes(pool.dtype.itemsize)
        held = f"queries={queries.tokens} a window (up to {most} bytes a request) "
    if plan.splits != "map":
        held += f"splits={plan.splits} "
    groups = len(layout.groups) - layout.score_groups
    if plan.gates is not None:
        share = layout.score_groups / (layout.num_full - layout.score_groups)
        held += f"gates={plan.gates.path} (scores take {share:.1%} of raw pages) "
    return (
        f"tangram: plan={plan.name} scorer={plan.scorer_name} retention asked={plan.retention:.4f} "
        f"held={layout.retention_held:.4f} groups={groups}x{layout.per_group} heads "
        f"window={rule.window} recent={rule.recent} page={rule.page} sinks={rule.sinks} "
        f"{held}"
        f"capacity={pool.size} true tokens in {pool.ledger.num_pages} pages, "
        f"{pool.get_kv_size_bytes()} bytes"
    )
