"""The window trie: which prefixes lie in the pool, who uses them, what goes first.

docs/design.md (Prefix reuse) says why.

Nothing ever splits: an edge is a whole window or a whole page. Pages enter by changing owner and
leave through ``release``; the trie itself copies and writes nothing.
"""

import heapq
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import numpy as np

from tangram_sglang.cache.node import NO_PAGES, Node, Prefix, Tokens
from tangram_sglang.cache.slides import Slides
from tangram_sglang.plan.window import WindowRule


class WindowTrie:
    """One tree per namespace over one pool; ``top`` has the root of each.

    Args:
        rule: windows, recent tokens and pages.
        most_raw: raw tokens behind the windows of a match, at most; whole pages.
        slide: tokens before the end of a match that sliding-window layers must have; whole pages.
        release: called with (pages, owner id) when a node goes.
    """

    def __init__(
        self,
        rule: WindowRule,
        release: Callable[[np.ndarray, int], None],
        most_raw: int,
        slide: int = 0,
    ):
        self._rule = rule
        self._most_raw = most_raw
        self._slide = slide
        self._release = release
        self._clock = 0
        self._next_id = -1
        self.clear()

    def clear(self) -> None:
        """Forget everything without releasing it: the owner of the pages has taken all back."""
        self.top = Node(None, (), False, 0)
        # least recently used first; has every unlocked leaf, and nodes that no longer are one
        self._leaves: list[tuple[int, int, Node]] = []
        self.unlocked_pages = 0
        self.locked_pages = 0

    def root(self, namespace: Hashable) -> Node:
        """The empty prefix of ``namespace``; made on first use."""
        if namespace not in self.top.children:
            self.top.children[namespace] = Node(None, (), False, 0)
        return self.top.children[namespace]

    def match(self, namespace: Hashable, tokens: Sequence[int], limit: int) -> Prefix:
        """The state to start from: the longest exact one, unless the branch is longer.

        A state is exact where at least R raw tokens follow its windows (or it has no window): its
        next query then sees what it would have seen without the cache. Without them the request
        goes back as many windows as hold R tokens and has them prefilled again. Where layers have
        sliding windows, the state must have their pages as well, and a shorter one may have to do.

        Args:
            namespace: what must be equal beside the tokens.
            tokens: the whole prompt.
            limit: most tokens to match.
        """
        if namespace not in self.top.children:
            return Prefix(0)
        spine = [self.root(namespace)]
        while child := self._child(spine[-1], tokens, limit, True):
            spine.append(child)
        sealed = 1
        while sealed < len(spine) and len(spine[sealed].pages):
            sealed += 1
        windows = spine[1:sealed]
        size, recent = self._rule.window, self._rule.recent
        slides = self.slides(spine, tokens, limit)
        kept = max(0, len(windows) - -(-recent // size))
        while kept and not slides.complete(kept * size):
            kept -= 1
        branch, exact = Prefix(kept * size, tuple(windows[:kept])), Prefix(0)
        held = len(windows) * size
        for count in range(len(windows), -1, -1):
            most = (count + 1) * size + recent
            if most < branch.tokens or most <= exact.tokens:
                break
            tail, passed = self._tail(spine, count, tokens, limit)
            raw = len(tail) * self._rule.page
            held = max(held, count * size + raw)
            while raw and not slides.complete(count * size + raw):
                raw -= self._rule.page
            end = count * size + raw
            if end > exact.tokens and (not count or raw >= recent) and slides.complete(end):
                tail, passed = tail[: raw // self._rule.page], passed[: (raw - 1) // size]
                exact = Prefix(end, tuple(windows[:count]), tail, passed)
        best = exact if exact.tokens >= branch.tokens else branch
        best = slides.behind(best)
        self._touch(best.nodes)
        return replace(best, given_up=held - best.tokens)

    def slides(self, spine: Sequence[Node], tokens: Sequence[int], limit: int) -> Slides:
        """Pages of sliding windows along ``tokens``.

        Args:
            spine: the root and the window nodes below it.
            limit: most tokens to follow.
        """
        edges: dict[int, Node] = {}
        per_window = self._rule.window // self._rule.page
        for j, node in enumerate(spine if self._slide else ()):
            for i in range(per_window):
                node = self._child(node, tokens, limit, False)
                if node is None:
                    break
                edges[j * per_window + i] = node
        return Slides(self._rule, self._slide, edges)

    def child(self, parent: Node, key: Tokens, is_window: bool) -> Node | None:
        """The edge of these tokens, or None."""
        return parent.children.get((is_window, key))

    def add(self, parent: Node, key: Tokens, is_window: bool) -> Node:
        """The edge of these tokens; made, without pages, where there is none."""
        node = self.child(parent, key, is_window)
        if node is None:
            node = parent.children[is_window, key] = Node(parent, key, is_window, self._next_id)
            self._next_id -= 1
            self._touch((node,))
            self._queue(node)
        return node

    def fill(self, node: Node, pages: np.ndarray) -> None:
        """Give a node without pages its own; the caller hands them over to ``node.id``."""
        if len(node.pages):
            raise RuntimeError(f"the node up to token {node.tokens} has pages already")
        node.pages = pages
        if node.readers:
            self.locked_pages += len(pages)
        else:
            self.unlocked_pages += len(pages)

    def lock(self, prefix: Prefix) -> None:
        """Keep the nodes ``prefix`` stands on, and the pages it reads; counted."""
        for node in prefix.nodes:
            node.locks += 1
        for node in prefix.read:
            if node.readers == 0:
                self._move(node, +1)
            node.readers += 1
        self._touch(prefix.nodes)

    def unlock(self, prefix: Prefix) -> None:
        """Undo one ``lock``."""
        for node in prefix.nodes:
            if node.locks == 0:
                raise RuntimeError(f"the node up to token {node.tokens} is not locked")
            node.locks -= 1
            self._queue(node)
        for node in prefix.read:
            node.readers -= 1
            if node.readers == 0:
                self._move(node, -1)

    def evict(self, pages: int) -> int:
        """Make ``pages`` pages free, least recently used leaves first; pages released.

        Where leaves do not suffice, windows that raw tails pass give theirs, and raw pages above
        slides, as far as nobody reads them; the nodes stay without pages.
        """
        released, emptied = 0, False
        while self._leaves and released < pages:
            used, _, node = heapq.heappop(self._leaves)
            node.queued = False
            if node.children or node.locks:
                continue
            if node.used > used:
                self._queue(node)
                continue
            del node.parent.children[node.is_window, node.key]
            released += self._strip(node)
            self._queue(node.parent)
            emptied |= node.parent.parent is None and not node.parent.children
        if released < pages and self.unlocked_pages:
            # no unlocked leaf is left, so whoever has pages without readers is above one that has some
            passed = [node for node in self.nodes() if len(node.pages) and not node.readers]
            for node in sorted(passed, key=lambda node: (node.used, -node.id)):
                if released >= pages:
                    break
                released += self._strip(node)
        if emptied:
            roots = self.top.children
            self.top.children = {name: root for name, root in roots.items() if root.children}
        return released

    def nodes(self) -> list[Node]:
        """All nodes but the roots."""
        found, todo = [], list(self.top.children.values())
        while todo:
            children = list(todo.pop().children.values())
            found += children
            todo += children
        return found

    def check(self) -> None:
        """Counters and locks agree with the tree; RuntimeError with the numbers if not."""
        nodes = self.nodes()
        locked = sum(len(x.pages) for x in nodes if x.readers)
        unlocked = sum(len(x.pages) for x in nodes if not x.readers)
        if (locked, unlocked) != (self.locked_pages, self.unlocked_pages):
            raise RuntimeError(
                f"trie holds {locked} locked and {unlocked} unlocked pages, counts "
                f"{self.locked_pages} and {self.unlocked_pages}"
            )
        for x in nodes:
            if not (x.children or x.locks or x.queued):
                raise RuntimeError(f"the leaf up to token {x.tokens} is out of eviction's sight")
            if any(child.locks > x.locks for child in x.children.values()):
                raise RuntimeError(f"the node up to token {x.tokens} is locked less than below it")
            if x.readers > (x.locks if len(x.pages) else 0):
                raise RuntimeError(
                    f"the node up to token {x.tokens} has {len(x.pages)} pages, {x.readers} readers "
                    f"and {x.locks} locks"
                )

    def _tail(self, spine, count: int, tokens, limit: int):
        """Raw page nodes behind ``count`` windows, and the window nodes they pass."""
        tail, passed = [], []
        page, size = self._rule.page, self._rule.window
        per_window = size // page
        for i in range(self._most_raw // page):
            if i % per_window:
                node = tail[-1]
            elif count + i // per_window < len(spine):
                node = spine[count + i // per_window]
            else:
                break
            child = self._child(node, tokens, limit, False)
            if child is None or not len(child.pages):
                break
            if i and i % per_window == 0:
                passed.append(node)
            tail.append(child)
        return tuple(tail), tuple(passed)

    def _child(self, node: Node, tokens, limit: int, is_window: bool) -> Node | None:
        end = node.tokens + (self._rule.window if is_window else self._rule.page)
        if end > limit:
            return None
        return node.children.get((is_window, tuple(tokens[node.tokens : end])))

    def _touch(self, nodes) -> None:
        self._clock += 1
        for node in nodes:
            node.used = self._clock

    def _queue(self, node: Node) -> None:
        """Put an unlocked leaf in line for eviction."""
        if node.parent is not None and not (node.children or node.locks or node.queued):
            node.queued = True
            heapq.heappush(self._leaves, (node.used, -node.id, node))

    def _strip(self, node: Node) -> int:
        """Release the pages of a node that nobody reads; how many."""
        pages, node.pages = node.pages, NO_PAGES
        if len(pages):
            self.unlocked_pages -= len(pages)
            self._release(pages, node.id)
        return len(pages)

    def _move(self, node: Node, sign: int) -> None:
        self.locked_pages += sign * len(node.pages)
        self.unlocked_pages -= sign * len(node.pages)
