"""Nodes of the window trie, and the states a request can start from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

Tokens = tuple[int, ...]
# the edge of a slide among the children of a page edge
SLIDE = (False, ())
NO_PAGES = np.empty(0, dtype=np.int32)


class Node:
    """An edge of the trie and the pages it owns.

    A window edge holds W tokens and, once sealed, the pages that all groups keep of them. The raw
    pages of the *next* window hang below it, one page edge of P tokens after another: a raw tail
    that crosses a window border goes on below the next window edge, so sealing moves nothing.

    Pages of sliding-window layers have an edge of their own, a **slide** of no tokens below the page
    edge of the same tokens: where a prefix ends, they are needed behind sealed windows too.

    Attributes:
        parent: None for a root.
        key: tokens of the edge.
        is_window: whether the edge is a window.
        pages: ids of the pages the node owns, [pages] int32; empty for a window not sealed yet.
        tokens: length of the prefix up to and with this node.
        children: by kind of edge and its tokens.
        locks: requests that stand on this node: it stays in the tree.
        readers: those of them that read its pages: they stay, too. Fewer than ``locks`` where a raw
            tail passes a window that another request sealed, and where a slide is read but not the
            raw page above it.
        used: value of the trie's clock when the node was last matched, locked or made.
        queued: whether the trie's queue of leaves has an entry of it.
        id: owner id in the ledger, below 0.
    """

    __slots__ = (
        "children",
        "id",
        "is_window",
        "key",
        "locks",
        "pages",
        "parent",
        "queued",
        "readers",
        "tokens",
        "used",
    )

    def __init__(self, parent: Node | None, key: Tokens, is_window: bool, node_id: int):
        self.parent = parent
        self.key = key
        self.is_window = is_window
        self.id = node_id
        self.pages = NO_PAGES
        self.tokens = len(key) + (parent.tokens if parent else 0)
        self.children: dict[tuple[bool, Tokens], Node] = {}
        self.locks = 0
        self.readers = 0
        self.used = 0
        self.queued = False


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The state after some cached tokens: sealed windows, then whole raw pages.

    Attributes:
        tokens: length.
        windows: nodes of the sealed windows, first to last.
        tail: nodes of the raw pages behind them, first to last.
        spine: nodes of windows that the tail passes; it reads their tokens raw, whether or not
            somebody has sealed them.
        slide: nodes of the sliding windows' pages before the end, first to last.
        chain: nodes of raw pages above slides that are not part of the tail; not read.
        given_up: tokens that the cache holds behind these and that are computed again, because too
            few of them are raw.
    """

    tokens: int
    windows: tuple[Node, ...] = ()
    tail: tuple[Node, ...] = ()
    spine: tuple[Node, ...] = ()
    slide: tuple[Node, ...] = ()
    chain: tuple[Node, ...] = ()
    given_up: int = 0

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes the state stands on; each once, parents before children."""
        return (*self.windows, *self.spine, *self.chain, *self.tail, *self.slide)

    @property
    def read(self) -> tuple[Node, ...]:
        """Those whose pages it reads."""
        return (*self.windows, *self.tail, *self.slide)

    def sole_from(self, page: int) -> int:
        """Token from which on the asker alone reads the tail; it has locked the prefix.

        Another request may have sealed the first windows that the tail passes, and read on behind them.
        """
        shared = len(self.tail)
        while shared and self.tail[shared - 1].readers <= 1:
            shared -= 1
        return self.tokens - (len(self.tail) - shared) * page

    def without_slide(self) -> Prefix:
        """The same without the pages of sliding windows, which nobody reads any more."""
        return replace(self, slide=(), chain=())

    def behind(self, start: int) -> Prefix:
        """The same without the tail pages before token ``start``, which nobody reads any more."""
        tail = tuple(node for node in self.tail if node.tokens > start)
        if not self.slide:
            return replace(self, tail=tail, spine=self.spine if tail else ())
        # a slide stays below the page edges of its window
        above = {node for slide in self.slide for node in _page_edges(slide)}
        gone = self.tail[: len(self.tail) - len(tail)]
        chain = (*self.chain, *(node for node in gone if node in above))
        return replace(self, tail=tail, chain=chain)


def _page_edges(slide: Node) -> Iterator[Node]:
    """Those above a slide, up to the border of their window."""
    node = slide.parent
    while node is not None and not node.is_window and node.key:
        yield node
        node = node.parent
