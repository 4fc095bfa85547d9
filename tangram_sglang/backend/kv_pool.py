"""The page pool as SGLang's KVCache: one buffer for every layer and head."""

import torch
from sglang.srt.mem_cache.memory_pool import GB, KVCache

from tangram_sglang.backend.drift import DriftWatch
from tangram_sglang.cache.node import Prefix
from tangram_sglang.cache.store import PrefixStore
from tangram_sglang.plan.serving import ServingPlan
from tangram_sglang.pool.ledger import Ledger
from tangram_sglang.pool.rows import Rows


class TangramKVPool(KVCache):
    """Pages ``[pages + 1 + spare, H_p, K and V, P, D]`` and their host-side books.

    Page 0 is the dummy. The ``spare`` pages at the end are nobody's: a step on a GPU copies there
    what it still reads of pages that it writes to. ``size`` is the capacity in true tokens: the longest request that the
    pages carry to its end, or less where the user capped it.
    """

    def __init__(
        self,
        plan: ServingPlan,
        *,
        size: int,
        num_pages: int,
        num_spare: int,
        max_rows: int,
        dtype: torch.dtype,
        device: str,
        layer_num: int,
        enable_memory_saver: bool,
    ):
        layout = plan.layout
        super().__init__(
            size=size,
            page_size=1,
            dtype=dtype,
            layer_num=layer_num,
            device=device,
            enable_memory_saver=enable_memory_saver,
        )
        self.plan = plan
        self.ledger = Ledger(num_pages)
        self.rows = Rows(layout, self.ledger, max_rows)
        if num_spare:
            self.rows.spare = num_spare
        # set by the prefix cache, which SGLang builds last; and the prefix matched last
        self.store: PrefixStore | None = None
        self.candidate: Prefix | None = None
        # set with the backend, where TANGRAM_DRIFT asks for it
        self.drift: DriftWatch | None = None
        self.spare = range(num_pages + 1, num_pages + 1 + num_spare)
        shape = (self.spare.stop, layout.per_group, 2, layout.rule.page, layout.head_dim)
        self.pages = torch.zeros(shape, dtype=dtype, device=device)
        self.mem_usage = self.get_kv_size_bytes() / GB

    @property
    def flat(self) -> torch.Tensor:
        """The pool as rows of D."""
        return self.pages.view(-1, self.pages.shape[-1])

    @property
    def lines(self) -> torch.Tensor:
        """The pool as a line of fp32 a page, for gate scores."""
        return self.pages.flatten(1).view(torch.float32)

    def tokens(self, pages: int) -> int:
        """``pages`` as a share of the capacity in true tokens.

        Monotone, 0 at 0 and the whole capacity at all pages, so that SGLang's exact sums over
        free, evictable and protected tokens close.
        """
        return pages * self.size // self.ledger.num_pages

    @property
    def reachable_pages(self) -> int:
        """Pages that are free or that eviction would free."""
        return self.ledger.free + self.store.trie.unlocked_pages

    def get_kv_size_bytes(self) -> int:
        return self.pages.numel() * self.pages.element_size()

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        raise self._no_layer_buffer()

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        raise self._no_layer_buffer()

    def get_kv_buffer(self, layer_id: int):
        raise self._no_layer_buffer()

    def set_kv_buffer(self, layer, loc, cache_k, cache_v) -> None:
        raise self._no_layer_buffer()

    def _no_layer_buffer(self) -> RuntimeError:
        return RuntimeError(
            "the tangram pool has no buffer of one layer: heads of several layers share a page. "
            "The feature that asked for it does not work with --attention-backend tangram"
        )
