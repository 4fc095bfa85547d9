"""The window trie: what matches, what is exact, what may go."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tangram_sglang.cache.node import Prefix
from tangram_sglang.cache.trie import WindowTrie
from tangram_sglang.plan.window import WindowRule
from tangram_sglang.pool.ledger import Ledger

RULE = WindowRule(window=8, recent=4, page=2, sinks=2)
TOKENS = tuple(range(100))


class Pool:
    """A trie over a ledger, filled as a request of row 1 would."""

    def __init__(self, rule=RULE, pages=400):
        self.rule = rule
        self.ledger = Ledger(pages)
        self.trie = WindowTrie(rule, self.ledger.give, rule.window + rule.recent)

    def publish(self, tokens, namespace=None) -> Prefix:
        """Everything a request leaves after ``tokens``: sealed windows, then its raw tail."""
        rule, trie = self.rule, self.trie
        node, windows = trie.root(namespace), []
        for j in range(rule.sealed(len(tokens))):
            key = tuple(tokens[j * rule.window : (j + 1) * rule.window])
            node = trie.add(node, key, True)
            self._fill(node, 3)
            windows.append(node)
        base, tail, spine = node, [], []
        for page in range(base.tokens // rule.page, len(tokens) // rule.page):
            start = page * rule.page
            if start % rule.window == 0 and start > base.tokens:
                base = node = trie.add(base, tuple(tokens[start - rule.window : start]), True)
                spine.append(base)
            node = trie.add(node, tuple(tokens[start : start + rule.page]), False)
            self._fill(node, 2)
            tail.append(node)
        length = len(windows) * rule.window + len(tail) * rule.page
        return Prefix(length, tuple(windows), tuple(tail), tuple(spine))

    def _fill(self, node, count):
        if not len(node.pages):
            pages = self.ledger.take(count, 1)
            self.ledger.hand_over(pages, 1, node.id)
            self.trie.fill(node, pages)

    def match(self, tokens, namespace=None, limit=None) -> Prefix:
        return self.trie.match(namespace, tokens, len(tokens) if limit is None else limit)

    def check(self):
        self.trie.check()
        self.ledger.check()
        cached = self.trie.locked_pages + self.trie.unlocked_pages
        assert self.ledger.free + cached == self.ledger.num_pages
        for node in self.trie.nodes():
            assert np.array_equal(np.sort(node.pages), self.ledger.owned(node.id))


@pytest.mark.parametrize("length", [1, 2, 7, 8, 12, 13, 20, 21, 27, 28, 29, 36, 60, 61])
def test_a_continued_text_goes_on_from_its_last_whole_page(length):
    pool = Pool()
    pool.publish(TOKENS[:length])
    found = pool.match(TOKENS, limit=99)
    assert found.tokens == length // 2 * 2
    # the next query sees what it would have seen cold
    assert len(found.windows) in (
        RULE.sealed(found.tokens + 1),
        RULE.sealed(found.tokens),
    )
    assert [node.tokens for node in found.tail] == list(
        range(len(found.windows) * 8 + 2, found.tokens + 1, 2)
    )
    pool.check()


def test_a_tail_that_passes_a_window_border_is_found_again_once_that_window_is_sealed():
    pool = Pool()
    # 12 raw tokens: window 0 whole, and two pages of window 1
    first = pool.publish(TOKENS[:12])
    assert (len(first.windows), len(first.tail), len(first.spine)) == (0, 6, 1)
    pool.publish(TOKENS[:30])
    assert pool.match(TOKENS[:12] + (500,) * 9).tokens == 12
    assert pool.match(TOKENS[:30] + (500,) * 9).tokens == 30
    pool.check()


def test_leaving_the_text_before_its_tail_goes_back_one_window():
    pool = Pool()
    pool.publish(TOKENS[:61])
    found = pool.match(TOKENS[:43] + (500,) * 20)
    assert (found.tokens, len(found.windows), found.tail) == (4 * 8, 4, ())
    assert pool.match(TOKENS[:9] + (500,) * 20).tokens == 0


def test_without_recent_tokens_nothing_is_given_up():
    pool = Pool(WindowRule(8, 0, 2, 2))
    pool.publish(TOKENS[:61])
    assert pool.match(TOKENS[:43] + (500,) * 20).tokens == 40


def test_the_limit_holds_whatever_matches():
    pool = Pool()
    pool.publish(TOKENS[:60])
    for limit in range(61):
        assert pool.match(TOKENS[:60], limit=limit).tokens <= limit


def test_namespaces_share_nothing():
    pool = Pool()
    pool.publish(TOKENS[:60], namespace="a")
    assert pool.match(TOKENS[:60], namespace="b").tokens == 0
    # a namespace that holds nothing takes no memory
    assert list(pool.trie.top.children) == ["a"]
    pool.trie.evict(10**6)
    assert not pool.trie.top.children


def test_eviction_takes_least_recently_used_leaves_first_and_never_what_is_locked():
    pool = Pool()
    old, new = TOKENS[:40], (500, *TOKENS[1:40])
    pool.publish(old)
    pool.publish(new)
    kept = pool.match(old)
    pool.trie.lock(kept)
    total = pool.trie.unlocked_pages
    assert pool.trie.evict(10**6) == total
    assert pool.match(old).tokens == kept.tokens
    assert pool.match(new).tokens == 0
    pool.trie.unlock(kept)
    pool.publish(new)
    pool.trie.evict(1)
    # the end of the older text went first, and only that
    assert pool.match(old).tokens < kept.tokens
    assert pool.match(new).tokens == 40
    pool.check()


def test_a_window_that_a_tail_passes_gives_its_pages_last_and_stays_where_it_is():
    pool = Pool()
    # window 0 whole and R raw tokens behind it, then another request seals that window
    pool.publish(TOKENS[:12])
    passing = pool.match(TOKENS[:12])
    assert (len(passing.windows), len(passing.spine), passing.tokens) == (0, 1, 12)
    pool.trie.lock(passing)
    pool.publish(TOKENS[:21])
    (window,) = passing.spine
    assert len(window.pages) == 3 and window.readers == 0
    pool.check()
    rest = pool.trie.unlocked_pages - 3
    assert pool.trie.evict(rest) == rest and len(window.pages) == 3
    assert pool.trie.evict(1) == 3 and not len(window.pages)
    pool.check()
    # the tail is whole, and the window is sealed again as if for the first time
    assert pool.match(TOKENS[:12]).nodes == passing.nodes
    pool.publish(TOKENS[:21])
    assert len(window.pages) == 3
    reading = pool.match(TOKENS[:21])
    pool.trie.lock(reading)
    assert reading.windows[0] is window and window.readers == 1
    assert pool.trie.evict(10**6) == 0
    pool.trie.unlock(passing)
    pool.trie.unlock(reading)
    assert pool.trie.evict(10**6) > 0 and not pool.trie.nodes()
    pool.check()


class TrieMachine(RuleBasedStateMachine):
    """Publish, match, lock, unlock, evict and clear in any order."""

    @initialize(recent=st.integers(0, 12))
    def build(self, recent):
        self.pool = Pool(WindowRule(8, recent, 2, 2), pages=150)
        self.locked = []

    texts = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=70)

    @rule(tokens=texts, namespace=st.sampled_from(["a", "b"]))
    def publish(self, tokens, namespace):
        need = len(tokens) * 2
        if self.pool.ledger.free < need:
            self.pool.trie.evict(need - self.pool.ledger.free)
        if self.pool.ledger.free >= need:
            prefix = self.pool.publish(tokens, namespace)
            assert self.pool.match(tokens, namespace).tokens >= prefix.tokens

    @rule(tokens=texts, namespace=st.sampled_from(["a", "b"]))
    def match_and_lock(self, tokens, namespace):
        found = self.pool.match(tokens, namespace)
        keys = [t for node in (*found.windows, *found.tail) for t in node.key]
        assert keys == tokens[: found.tokens]
        assert all(len(node.pages) for node in (*found.windows, *found.tail))
        self.pool.trie.lock(found)
        self.locked.append(found)

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def unlock(self, data):
        self.pool.trie.unlock(self.locked.pop(data.draw(st.integers(0, len(self.locked) - 1))))

    @rule(pages=st.integers(1, 60))
    def evict(self, pages):
        unlocked, free = self.pool.trie.unlocked_pages, self.pool.ledger.free
        released = self.pool.trie.evict(pages)
        assert released >= min(pages, unlocked)
        assert self.pool.ledger.free == free + released

    @invariant()
    def books_are_right(self):
        if hasattr(self, "pool"):
            self.pool.check()
            for prefix in self.locked:
                assert all(node.locks for node in prefix.nodes)
                assert all(node.readers and len(node.pages) for node in prefix.read)


TestTrie = TrieMachine.TestCase
TestTrie.settings = settings(max_examples=40, stateful_step_count=40)
