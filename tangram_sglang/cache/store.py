"""Publishes what rows hold into the trie: pages change owner, nothing is copied.

    row:   [ windows 0..s )                [ raw tail: whole pages )[ last, partial page )
    after  every window and whole page is a node's; the row goes on reading them
           the partial page stays the row's, which may write to it

So with the pages of sliding windows: those of whole pages are a node's, and the row goes on reading them.

What the trie has already keeps the trie's copy; the row is pointed at it and gives its own back.
"""

from collections.abc import Hashable, Sequence

from tangram_sglang.cache.node import Node, Prefix
from tangram_sglang.cache.trie import WindowTrie
from tangram_sglang.pool.rows import Rows


class PrefixStore:
    """A trie over the pages of ``rows``."""

    def __init__(self, rows: Rows):
        self._rows = rows
        self._layout = rows.layout
        rule = rows.layout.rule
        layout = rows.layout
        self.trie = WindowTrie(rule, rows.ledger.give, layout.queries.reusable(rule), layout.slide)
        rows.evict = self.evict

    def evict(self, pages: int) -> int:
        """Make ``pages`` pages free, as far as no request reads them; pages freed."""
        released = self.trie.evict(pages)
        self._rows.tally.evicted_pages += released
        return released

    def publish(self, row: int, namespace: Hashable, tokens: Sequence[int]) -> Prefix:
        """Share the row's sealed windows and the whole pages of its tail; the state they make.

        Args:
            row: a live row with at least ``tokens`` stored.
            namespace: what must be equal beside the tokens.
            tokens: the request's tokens from the start. Where they end before the sealed windows do,
                as with ``--strip-thinking-cache``, the row has no raw tail of them.
        """
        state, rule = self._rows.live[row], self._layout.rule
        sealed, whole = rule.sealed(state.n, state.floor), len(tokens) // rule.window
        windows = self._publish_windows(row, min(sealed, whole), namespace, tokens)
        if whole < sealed:
            return Prefix(whole * rule.window, tuple(windows))
        found = self._publish_tail(row, windows, namespace, tokens)
        return self._publish_slide(row, found, namespace, tokens) if self._layout.slide else found

    def check(self) -> None:
        """free + private + cached == total; every row, node and counter in order."""
        self._rows.check()
        self.trie.check()
        ledger = self._rows.ledger
        private = sum(len(self._rows.private_pages(row)) for row in self._rows.live)
        cached = self.trie.locked_pages + self.trie.unlocked_pages
        if ledger.free + private + cached != ledger.num_pages:
            raise RuntimeError(
                f"free {ledger.free} + private {private} + cached {cached} != "
                f"{ledger.num_pages} pages"
            )

    def _publish_windows(self, row, count: int, namespace, tokens) -> list[Node]:
        rows, size = self._rows, self._layout.rule.window
        state = rows.live[row]
        node, nodes = self.trie.root(namespace), []
        for j in range(count):
            node = self.trie.add(node, tuple(tokens[j * size : (j + 1) * size]), True)
            nodes.append(node)
            if j >= state.cached_windows:
                if len(node.pages):
                    rows.share_window(row, node.pages, None)
                else:
                    self.trie.fill(node, rows.window_pages(row, j))
                    rows.share_window(row, node.pages, node.id)
        return nodes

    def _publish_tail(self, row, windows: list[Node], namespace, tokens) -> Prefix:
        rows, rule = self._rows, self._layout.rule
        state = rows.live[row]
        base = windows[-1] if windows else self.trie.root(namespace)
        node, tail, spine = base, [], []
        for page in range(base.tokens // rule.page, len(tokens) // rule.page):
            start = page * rule.page
            if start % rule.window == 0 and start > base.tokens:
                before = tuple(tokens[start - rule.window : start])
                base = node = self.trie.add(base, before, True)
                spine.append(base)
            node = self.trie.add(node, tuple(tokens[start : start + rule.page]), False)
            tail.append(node)
            if start >= state.cached_tokens:
                if len(node.pages):
                    rows.share_tail_page(row, page, node.pages, None)
                else:
                    self.trie.fill(node, rows.tail_page(row, page))
                    rows.share_tail_page(row, page, node.pages, node.id)
        length = len(windows) * rule.window + len(tail) * rule.page
        return Prefix(length, tuple(windows), tuple(tail), tuple(spine))

    def _publish_slide(self, row, found: Prefix, namespace, tokens) -> Prefix:
        rows, rule, trie = self._rows, self._layout.rule, self.trie
        held = self._layout.held_start(self._layout.slide, rows.live[row].n)
        spine = (trie.root(namespace), *found.windows, *found.spine)
        for j in range(held // rule.window, len(spine)):
            node, border = spine[j], j * rule.window
            for start in range(border, min(border + rule.window, found.tokens), rule.page):
                node = trie.add(node, tuple(tokens[start : start + rule.page]), False)
                if start >= held:
                    self._share_slide(row, start // rule.page, trie.add(node, (), False))
        slides = trie.slides(spine, tokens, found.tokens)
        # a row that went on past these tokens has let go of some
        return slides.behind(found) if slides.complete(found.tokens) else found

    def _share_slide(self, row: int, page: int, node: Node) -> None:
        if page * self._layout.rule.page < self._rows.live[row].cached_slide:
            return
        if len(node.pages):
            self._rows.share_slide_page(row, page, node.pages, None)
        else:
            self.trie.fill(node, self._rows.slide_page(row, page))
            self._rows.share_slide_page(row, page, node.pages, node.id)
