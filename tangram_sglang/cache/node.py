"""Nodes of the window trie, and the states a request can start from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Tokens = tuple[int, ...]
NO_PAGES = np.empty(0, dtype=np.int32)


class Node:
    """An edge of the trie and the pages it owns.

    A window edge holds W tokens and, once sealed, the pages that all groups keep of them. The raw
    pages of the *next* window hang below it, one page edge of P tokens after another: a raw tail
    that crosses a window border goes on below the next window edge, so sealing moves nothing.

    Attributes:
        parent: None for a root.
        key: tokens of the edge.
        is_window: whether the edge is a window.
        pages: ids of the pages the node owns, [pages] int32; empty for a window not sealed yet.
        tokens: length of the prefix up to and with this node.
        children: by kind of edge and its tokens.
        locks: requests that stand on this node.
        used: value of the trie's clock when the node was last matched, locked or made.
        id: owner id in the ledger, below 0.
    """

    __slots__ = ("children", "id", "is_window", "key", "locks", "pages", "parent", "tokens", "used")

    def __init__(self, parent: Node | None, key: Tokens, is_window: bool, node_id: int):
        self.parent = parent
        self.key = key
        self.is_window = is_window
        self.id = node_id
        self.pages = NO_PAGES
        self.tokens = len(key) + (parent.tokens if parent else 0)
        self.children: dict[tuple[bool, Tokens], Node] = {}
        self.locks = 0
        self.used = 0


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The state after some cached tokens: sealed windows, then whole raw pages.

    Attributes:
        tokens: length.
        windows: nodes of the sealed windows, first to last.
        tail: nodes of the raw pages behind them, first to last.
        spine: nodes of windows not sealed that the tail passes.
    """

    tokens: int
    windows: tuple[Node, ...] = ()
    tail: tuple[Node, ...] = ()
    spine: tuple[Node, ...] = ()

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Everything the state needs; each node once, parents before children."""
        return (*self.windows, *self.spine, *self.tail)

    def from_token(self, start: int) -> Prefix:
        """What a row still reads of this once it has sealed its tail up to token ``start``.

        Keeps locks, and is no state to start from: the tokens in between are the row's own.
        """
        tail = tuple(node for node in self.tail if node.tokens > start)
        if tail:
            return Prefix(self.tokens, self.windows, tail, self.spine)
        return Prefix(self.windows[-1].tokens if self.windows else 0, self.windows)
