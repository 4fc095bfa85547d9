"""Rows, ledger and trie together, driven in any order; what a page holds is tracked beside."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tangram_sglang.cache.store import PrefixStore
from tangram_sglang.plan.layout import KVLayout
from tangram_sglang.plan.shape import LayerShape, ModelShape
from tangram_sglang.plan.window import WindowRule
from tangram_sglang.pool.ledger import Ledger
from tangram_sglang.pool.rows import Row, Rows

SHAPE = ModelShape(tuple(LayerShape(i, 3, 3, 8, None, 1.0) for i in range(3)))


class PoolMachine(RuleBasedStateMachine):
    """Admit, prefill in chunks, decode, seal, fork, finish, abort, retract, evict and flush.

    ``content`` says for which tokens each page was written last: a request must find in every page
    of its table what it would have written there itself.
    """

    @initialize(
        recent=st.integers(0, 5).map(lambda pages: 4 * pages), pages=st.sampled_from([120, 400])
    )
    def build(self, recent, pages):
        layout = KVLayout.build(
            SHAPE,
            WindowRule(16, recent, 4, 2),
            budgets=[i / 9 for i in range(9)],
            retention=0.4,
            per_group=3,
            grouping="global",
            max_tokens=300,
        )
        self.rows = Rows(layout, Ledger(pages), 3)
        self.rows.tail_left = self._leave_tail
        self.rows.sole_from = lambda row: self.locks[row].sole_from(4)
        self.store = PrefixStore(self.rows)
        self.texts: dict[int, list[int]] = {}
        self.locks = {}
        self.content: dict[int, tuple] = {}

    @rule(row=st.integers(1, 3), text=st.lists(st.sampled_from([1, 2]), min_size=1, max_size=150))
    def admit(self, row, text):
        if row in self.rows.live:
            return
        prefix = self.store.trie.match(None, text, len(text) - 1)
        self.store.trie.lock(prefix)
        windows = len(prefix.windows)
        start = Row(len(text), prefix.tokens, windows, windows, prefix.tokens)
        need = self.rows.demand(start, len(text), prefix.sole_from(4))
        reachable = self.rows.ledger.free + self.store.trie.unlocked_pages
        if need > reachable - self.rows.promised:
            self.store.trie.unlock(prefix)
            return
        self.rows.open(
            row, len(text), [x.pages for x in prefix.windows], [x.pages for x in prefix.tail]
        )
        self.texts[row], self.locks[row] = list(text), prefix
        self._read(row)

    @precondition(lambda self: self.rows.live)
    @rule(data=st.data(), token=st.sampled_from([1, 2]))
    def step(self, data, token):
        row = data.draw(st.sampled_from(sorted(self.rows.live)))
        state = self.rows.live[row]
        left = state.prompt - state.n
        n1 = state.n + (data.draw(st.integers(1, left)) if left > 0 else 1)
        if left <= 0:
            # decode: admission has promised nothing
            need = self.rows.row_demand(row, n1)
            reachable = self.rows.ledger.free + self.store.trie.unlocked_pages
            if n1 > 250 or need > reachable - self.rows.promised:
                return
            self.texts[row].append(token)
        self.rows.advance([(row, n1)])
        self._write(row)
        self._read(row)

    @precondition(lambda self: self.rows.live)
    @rule(data=st.data(), finish=st.booleans())
    def publish(self, data, finish):
        row = data.draw(st.sampled_from(sorted(self.rows.live)))
        if self.rows.live[row].n:
            text = self.texts[row][: self.rows.live[row].n]
            prefix = self.store.publish(row, None, text)
            self._relock(row, prefix)
            self._read(row)
            found = self.store.trie.match(None, [*text, 3], len(text))
            # what was published is found again: R is whole pages, so its tail makes an exact state
            assert found.tokens >= prefix.tokens
        if finish:
            self._close(row)

    @precondition(lambda self: self.rows.live)
    @rule(data=st.data())
    def abort(self, data):
        self._close(data.draw(st.sampled_from(sorted(self.rows.live))))

    @rule(pages=st.integers(1, 50))
    def evict(self, pages):
        self.store.trie.evict(pages)

    @precondition(lambda self: not self.rows.live)
    @rule()
    def flush(self):
        self.store.trie.clear()
        self.rows.clear()
        assert self.rows.ledger.free == self.rows.ledger.num_pages

    @invariant()
    def books_are_right(self):
        if hasattr(self, "store"):
            self.store.check()

    def _close(self, row):
        self.store.trie.unlock(self.locks.pop(row))
        self.rows.close(row)
        del self.texts[row]

    def _relock(self, row, prefix):
        self.store.trie.lock(prefix)
        self.store.trie.unlock(self.locks[row])
        self.locks[row] = prefix

    def _leave_tail(self, row, start):
        self._relock(row, self.locks[row].behind(start))

    def _pages(self, row):
        """(page, what it must hold, whether the last step wrote to it) for all the table names."""
        state, rule = self.rows.live[row], self.rows.layout.rule
        text, sealed = self.texts[row], rule.sealed(state.n, state.floor)
        s0, n0 = (state.step.s0, state.step.n0) if state.step else (sealed, state.n)
        for j in range(sealed):
            for i, page in enumerate(self.rows.window_pages(row, j)):
                yield int(page), ("window", i, tuple(text[: (j + 1) * rule.window])), j >= s0
        for p in range(sealed * rule.window // rule.page, rule.pages(state.n)):
            end = min(state.n, (p + 1) * rule.page)
            for g, page in enumerate(self.rows.tail_page(row, p)):
                yield int(page), ("raw", g, tuple(text[:end])), end > n0

    def _write(self, row):
        """The step's pages get what it writes, and none of them is the cache's."""
        private = set(self.rows.private_pages(row).tolist())
        for page, held, written in self._pages(row):
            if written:
                assert page in private
                self.content[page] = held

    def _read(self, row):
        for page, held, _ in self._pages(row):
            assert self.content[page] == held


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=60)
