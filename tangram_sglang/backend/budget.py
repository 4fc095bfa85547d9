"""Budget Reservation: admission in pages of the closed form (paper 4.1; docs/design.md)."""

from sglang.srt.mem_cache.prefill_budget import PrefillBudget

from tangram_sglang.backend.kv_pool import TangramKVPool
from tangram_sglang.cache.node import Prefix
from tangram_sglang.pool.row import Row


class TangramPrefillBudget(PrefillBudget):
    """Pages left in one scheduling pass.

        free + evictable = promised to prompts in prefill + expected output of running requests
               + admitted in this pass + left

    A prompt's pages are promised from its admission to its last chunk, so a later chunk never
    fails. Output is expected as stock SGLang does: ``total_offset`` tokens, which the scheduler
    estimates, spread evenly over the running requests.
    """

    def __init__(self, allocator, tree_cache, pool: TangramKVPool, *, num_mixed_decode_tokens=0):
        super().__init__(allocator, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)
        self._pool = pool
        self._admitted = 0
        self._candidate = 0
        # on a GPU there are spare pages for one row of a step that needs the pages of its own tail
        self._spare_used = False
        self._candidate_needs_spare = False

    @property
    def pages_left(self) -> int:
        """Pages that a new request may still reserve."""
        rows = self._pool.rows
        return self._pool.reachable_pages - rows.promised - self._expected_output() - self._admitted

    @property
    def remaining_total(self) -> int:
        return self._pool.tokens(max(0, self.pages_left))

    remaining_current = remaining_total

    def has_capacity(self) -> bool:
        return self.pages_left > 0

    def check_prefill(
        self,
        *,
        extend_input_len: int,
        total_tokens: int,
        max_new_tokens: int,
        input_tokens: int,
        swa_host_hit_length: int,
        chunk_limit: int | None,
        auxiliary_swa_host_hit_length: int = 0,
    ) -> tuple[bool, int | None]:
        """Whether prompt and output fit whole; a chunk is never cut for want of memory."""
        # SGLang matches a request right before it checks it, and has locked the match by now
        cached = input_tokens - extend_input_len
        # with SGLANG_RADIX_FORCE_MISS a request starts at token 0, whatever was found
        prefix = self._pool.candidate if cached else Prefix(0)
        if prefix.tokens != cached:
            raise RuntimeError(
                f"SGLang checks a request behind {cached} cached tokens, the last match has "
                f"{prefix.tokens}"
            )
        windows = len(prefix.windows)
        floor = self._pool.plan.layout.rule.floor(input_tokens, windows)
        slide = prefix.tokens if prefix.slide else 0
        start = Row(input_tokens, prefix.tokens, floor, windows, prefix.tokens, slide)
        rows, total = self._pool.rows, input_tokens + max_new_tokens
        self._candidate = rows.needs.demand(start, total, prefix.tokens)
        self._candidate_needs_spare = False
        limited = rows.spare < rows.ledger.num_pages
        if not limited or self._candidate > self.pages_left:
            # it also gets what it sets free of its cached tail, in the very step that reads it
            sole_from = prefix.sole_from(self._pool.plan.layout.rule.page)
            self._candidate = rows.needs.demand(start, total, sole_from)
            self._candidate_needs_spare = limited
        fits = self._candidate <= self.pages_left
        if self._candidate_needs_spare and self._spare_used:
            fits = False
        return (True, chunk_limit) if fits else (False, None)

    def can_allocate_prefill(self, **demand) -> bool:
        raise RuntimeError("can_allocate_prefill needs request slots that tangram does not reserve")

    def available_chunk_tokens(self, chunk_limit: int) -> int:
        # the pages of all chunks are promised since admission
        return chunk_limit

    def reserve(
        self,
        extend_input_len: int,
        max_new_tokens: int,
        *,
        extra_tokens: int = 0,
        chunk_limit: int | None = None,
        is_chunked_continuation: bool = False,
    ) -> None:
        # SGLang commits the request it checked last
        if not is_chunked_continuation:
            self._admitted += self._candidate
        self._spare_used |= is_chunked_continuation or self._candidate_needs_spare

    def _expected_output(self) -> int:
        rows = self._pool.rows
        running = [(row, state) for row, state in rows.live.items() if state.n >= state.prompt]
        if not running:
            return 0
        ahead = -int(-self.total_offset // len(running))
        return sum(max(0, rows.row_demand(row, state.n + ahead)) for row, state in running)
