"""Which queries are held for scorers that read them, and how many pages that takes.

A window is scored when it is sealed, R tokens after its end, and by then the queries of its last w
tokens must still be there. They lie in pages of the pool, taken and given back like any other:

    window j                [jW, (j+1)W)
    its w queries           [(j+1)W - w, (j+1)W)    held from the first of them on
    sealed by the token at  (j+1)W + R              which gives their pages back

    after n tokens the windows sealed(n) .. begun(n) hold queries,    begun(n) = (n + w - 1) // W
    they are most right before a sealing, n = (j+1)W + R:             ceil((R + w) / W)

The windows that a prefill step both begins and seals never hold any: it has their queries at hand.
"""

from dataclasses import dataclass

from tangram_sglang.errors import TangramError
from tangram_sglang.plan.shape import ModelShape
from tangram_sglang.plan.window import WindowRule


@dataclass(frozen=True, slots=True)
class QueryRule:
    """Queries held for each window that is not sealed yet; none with ``tokens`` 0.

    Attributes:
        tokens: w, last tokens of a window whose queries are held.
        ratio: query heads of each KV head.
        pages: pages that hold a window's queries, of all full-attention layers.
        slots: most windows that hold queries at once.
    """

    tokens: int = 0
    ratio: int = 1
    pages: int = 0
    slots: int = 0

    @classmethod
    def build(cls, shape: ModelShape, rule: WindowRule, tokens: int, page_rows: int) -> "QueryRule":
        """For the last ``tokens`` tokens of each window.

        Args:
            shape: attention layers of this rank.
            rule: W, R and P.
            tokens: 1 to W.
            page_rows: vectors of D that a page holds.
        """
        layers = [layer for layer in shape.layers if layer.sliding_window is None]
        if not 0 < tokens <= rule.window:
            raise TangramError(
                f"the scorer reads {tokens} queries of a window of {rule.window} tokens, expected 1 "
                f"to {rule.window}: correct its q_window"
            )
        ratios = {layer.q_heads // layer.kv_heads for layer in layers}
        if len(ratios) > 1:
            raise TangramError(
                f"layers of this model have {sorted(ratios)} query heads per KV head, and tangram "
                "holds queries for one number only; choose a scorer that reads none (TANGRAM_SCORER)"
            )
        vectors = sum(layer.q_heads for layer in layers) * tokens
        slots = -(-(rule.recent + tokens) // rule.window)
        return cls(tokens, ratios.pop(), -(-vectors // page_rows), slots)

    def begun(self, rule: WindowRule, n: int) -> int:
        """Windows whose last w tokens the first ``n`` tokens have reached; 0 if none hold queries."""
        return (n + self.tokens - 1) // rule.window if self.tokens else 0

    def held(self, rule: WindowRule, n: int, floor: int) -> int:
        """Pages that a request holds queries in after ``n`` tokens."""
        return self.pages * max(0, self.begun(rule, n) - rule.sealed(n, floor))

    def reusable(self, rule: WindowRule) -> int:
        """Raw tokens behind sealed windows that a prefix hit may start from; whole pages.

        The cache keeps no queries, so whoever goes on from it computes the last w tokens of the
        first window that is not sealed by itself.
        """
        if not self.tokens:
            return rule.window + rule.recent
        return (rule.window - self.tokens) // rule.page * rule.page


NO_QUERIES = QueryRule()
