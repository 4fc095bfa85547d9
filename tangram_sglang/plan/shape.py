"""What the pool and the plan need to know of a model: its attention layers."""

from dataclasses import dataclass

from tangram_sglang.errors import TangramError


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One attention layer.

    Attributes:
        layer_id: SGLang's layer id.
        q_heads, kv_heads: heads on this rank.
        head_dim: d of K and V.
        sliding_window: tokens a query sees, itself included; None for full attention.
        scaling: factor on q.k before the softmax.
    """

    layer_id: int
    q_heads: int
    kv_heads: int
    head_dim: int
    sliding_window: int | None
    scaling: float


@dataclass(frozen=True, slots=True)
class ModelShape:
    """All attention layers of this rank, in layer order."""

    layers: tuple[LayerShape, ...]

    def __post_init__(self):
        if not self.layers:
            raise TangramError("the model has no attention layer; nothing for tangram to serve")
        if all(layer.sliding_window is not None for layer in self.layers):
            raise TangramError(
                "every layer of the model has a sliding window, which bounds its KV already; "
                "serve it with another --attention-backend"
            )
        dims = sorted({layer.head_dim for layer in self.layers})
        if len(dims) > 1:
            raise TangramError(
                f"the model's layers have head sizes {dims}; one page pool holds one head size only"
            )

    @property
    def head_dim(self) -> int:
        """d, the same in all layers."""
        return self.layers[0].head_dim

    @property
    def full_heads(self) -> tuple[tuple[int, int], ...]:
        """(layer_id, kv head) of every head that a plan compresses, in global head order."""
        return tuple((x.layer_id, h) for x in self._full for h in range(x.kv_heads))

    @property
    def scalings(self) -> list[float]:
        """Factor on q.k of each of ``full_heads``."""
        return [x.scaling for x in self._full for _ in range(x.kv_heads)]

    @property
    def sliding_heads(self) -> dict[int, tuple[tuple[int, int], ...]]:
        """Heads of sliding-window layers by window size."""
        heads: dict[int, list[tuple[int, int]]] = {}
        for x in self.layers:
            if x.sliding_window is not None:
                heads.setdefault(x.sliding_window, []).extend(
                    (x.layer_id, h) for h in range(x.kv_heads)
                )
        return {window: tuple(group) for window, group in sorted(heads.items())}

    @property
    def _full(self):
        return [x for x in self.layers if x.sliding_window is None]
