"""Which prefixes along a path of the trie have the raw pages that sliding-window layers need.

A query sees the ``slide`` tokens up to itself there. So a request that goes on behind ``end`` tokens
reads the pages of tokens

    [ end - slide .. end )      of the sliding windows, or all from token 0 on

whether or not a window is sealed among them in the other layers.
"""

from collections.abc import Mapping
from dataclasses import replace

from tangram_sglang.cache.node import SLIDE, Node, Prefix
from tangram_sglang.plan.window import WindowRule


class Slides:
    """Of one path.

    Args:
        rule: windows and pages.
        slide: tokens of a sliding window, whole pages; 0 where no layer has one.
        edges: the path's page edges by their number, counted from token 0 and in its order.
    """

    def __init__(self, rule: WindowRule, slide: int, edges: Mapping[int, Node]):
        self._rule = rule
        self._slide = slide
        self._edges = edges
        # slides without a gap, up to and with each page
        self._run: dict[int, int] = {}
        for number, edge in edges.items():
            slide_edge = edge.children.get(SLIDE)
            if slide_edge is not None and len(slide_edge.pages):
                self._run[number] = self._run.get(number - 1, 0) + 1

    def complete(self, end: int) -> bool:
        """Whether a request can start behind ``end`` tokens, a page border."""
        pages = min(end, self._slide) // self._rule.page
        return pages <= self._run.get(end // self._rule.page - 1, 0)

    def behind(self, prefix: Prefix) -> Prefix:
        """``prefix``, for whose end they are complete, with its slides and the page edges above."""
        if not self._slide:
            return prefix
        page, size = self._rule.page, self._rule.window
        start = max(0, prefix.tokens - self._slide)
        # nothing hangs lower than the window edges
        first = start // size * size // page
        edges = [self._edges[i] for i in range(first, prefix.tokens // page)]
        raw = len(prefix.windows) * size
        return replace(
            prefix,
            slide=tuple(edge.children[SLIDE] for edge in edges if edge.tokens > start),
            chain=tuple(edge for edge in edges if edge.tokens <= raw),
        )
