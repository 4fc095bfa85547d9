"""A batch of requests on ragged pages whose every entry is known, for tests of the kernels.

The pool is NaN wherever no entry lies, so that whatever reads too far is seen in the result.
"""

import numpy as np
import torch

from tangram_sglang.kernels.decode import decode_attention
from tangram_sglang.kernels.dispatch import Dispatch, dispatch_step
from tangram_sglang.kernels.layer_tables import LayerTables
from tangram_sglang.kernels.shared_prefix import most_readers, read_together
from tangram_sglang.kernels.workspace import Workspace
from tangram_sglang.plan.layout import KVLayout
from tangram_sglang.plan.shape import LayerShape, ModelShape
from tangram_sglang.plan.split_map import SplitMap, plan_splits
from tangram_sglang.plan.window import WindowRule

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

RULE = WindowRule(32, 8, 4, 2)


class RaggedBatch:
    """Requests of ``lengths`` tokens, the newest one of which is not stored yet.

    Args:
        lengths: tokens per request, the newest included; 0 is a row of padding.
        budgets: per full-attention head, layer by layer.
        heads, ratio, dim: H, G and D.
        sliding: window of each layer, 0 for full attention.
        floors: windows each request had from the prefix cache.
        common: by leader, the windows it reads together with which others.
        guard: elements between pages of the pool that belong to nobody.
    """

    def __init__(
        self,
        lengths,
        budgets,
        *,
        heads,
        ratio=1,
        dim=16,
        sliding=(0,),
        dtype=torch.float32,
        rule=RULE,
        retention=0.5,
        per_group=2,
        floors=None,
        common=None,
        guard=0,
        seed=0,
    ):
        generator = np.random.default_rng(seed)
        torch.manual_seed(seed)
        self.lengths, self.heads, self.ratio, self.dim = lengths, heads, ratio, dim
        self.rule, self.dtype, self.scaling = rule, dtype, dim**-0.5
        layers = tuple(
            LayerShape(3 * i, heads * ratio, heads, dim, window or None, self.scaling)
            for i, window in enumerate(sliding)
        )
        self.layout = KVLayout.build(
            ModelShape(layers),
            rule,
            budgets=budgets,
            retention=retention,
            per_group=per_group,
            grouping="global",
            max_tokens=max(*lengths, rule.window) + 1,
        )
        self.tables = LayerTables.build(self.layout, DEVICE)
        self.sliding = sliding
        self.floors = floors or [0] * len(lengths)
        self.n_win = [
            self.rule.sealed(n, f) if n else 0 for n, f in zip(lengths, self.floors, strict=True)
        ]
        self.common = common or {}
        self.leader = {b: lead for lead, (_, others) in self.common.items() for b in others}
        self._fill(generator, guard)

    def _fill(self, generator, guard):
        layout, page = self.layout, self.rule.page
        places = sum(layout.pages(n, f) for n, f in zip(self.lengths, self.floors, strict=True))
        # more pages than entries need, in any order; page 0 is the dummy of padding
        pages = iter((generator.permutation(places + 9) + 1).tolist())
        shape = (places + 10, layout.per_group, 2, page, self.dim)
        size = int(np.prod(shape[1:]))
        self.slab = torch.full((shape[0], size + guard), torch.nan, dtype=self.dtype, device=DEVICE)
        self.pool = self.slab[:, :size].unflatten(1, shape[1:])
        # requests stand in rows of the table in any order; row 0 is padding's
        rows = iter((generator.permutation(len(self.lengths)) + 1).tolist())
        self.rows = [next(rows) if n else 0 for n in self.lengths]
        table = np.zeros((len(self.lengths) + 1, int(layout.table_offset[-1])), np.int32)
        # slots of the newest token and, per layer, request and head, all K and V
        self.newest, self.k, self.v = {}, {}, {}
        group_pages = {}
        # leaders first
        requests = sorted(enumerate(self.lengths), key=lambda request: request[0] in self.leader)
        for b, n in requests:
            for g, group in enumerate(layout.groups if n else ()):
                sealed = self.n_win[b] * int(layout.kept[g])
                start = layout.tail_start(group.sliding_window, n, self.floors[b])
                ring = int(layout.ring_slots[g])
                held = [(layout.table_offset[g] + i) for i in range(sealed // page)]
                for t in range(start // page, -(-n // page)):
                    held.append(layout.ring_offset[g] + t % ring)
                found = [next(pages) for _ in held]
                if b in self.leader and group.sliding_window is None:
                    same = self.same_entries(b, g) // page
                    found[:same] = group_pages[self.leader[b], g][0][:same]
                table[self.rows[b], held] = found
                group_pages[b, g] = found, sealed + n - start
        self.table = torch.from_numpy(table).to(DEVICE)
        for (layer_id, h), (g, column) in layout.place.items():
            i = self.tables.index[layer_id]
            for b, n in requests:
                if not n:
                    continue
                found, entries = group_pages[b, g]
                k, v = (torch.randn(entries, self.dim).to(self.dtype).to(DEVICE) for _ in "kv")
                if b in self.leader and not self.sliding[i]:
                    same, lead = self.same_entries(b, g), self.leader[b]
                    k[:same], v[:same] = self.k[i, lead, h][:same], self.v[i, lead, h][:same]
                slots = torch.arange(entries - 1, device=DEVICE)
                at = torch.tensor(found, device=DEVICE)[slots // page]
                self.pool[at, column, 0, slots % page] = k[:-1]
                self.pool[at, column, 1, slots % page] = v[:-1]
                window = self.sliding[i]
                first = max(0, entries - window) if window else 0
                self.k[i, b, h], self.v[i, b, h] = k[first:], v[first:]
                self.newest[i, b, h] = found[-1], column, (entries - 1) % page

    def same_entries(self, b, g):
        """Entries of a head of group g that b shares with its leader."""
        return self.common[self.leader[b]][0] * int(self.layout.kept[g])

    def records(self, dispatch):
        """Say in the dispatch's records what is read together."""
        records = dispatch.shared.cpu().numpy().copy()
        for lead, (windows, others) in self.common.items():
            read_together(records, [lead, *others], windows)
        dispatch.shared.copy_(torch.from_numpy(records))

    def inputs(self, layer):
        """q [B, HQ, D], and k_new, v_new [B, H, D] as slices of one tensor, as SGLang has them."""
        batch = len(self.lengths)
        q = torch.randn(batch, self.heads * self.ratio, self.dim).to(self.dtype).to(DEVICE)
        new = torch.full((batch, 2 * self.heads, self.dim), torch.nan, dtype=self.dtype)
        new = new.to(DEVICE)
        for (i, b, h), k in self.k.items():
            if i == layer:
                new[b, h], new[b, self.heads + h] = k[-1], self.v[i, b, h][-1]
        return q, new[:, : self.heads], new[:, self.heads :]

    def tensors(self):
        """rows, seq_lens, n_win in the types that SGLang has them in."""
        seq_lens = [max(n, 1) for n in self.lengths]
        return (
            torch.tensor(self.rows, device=DEVICE),
            torch.tensor(seq_lens, device=DEVICE),
            torch.tensor(self.n_win, dtype=torch.int32, device=DEVICE),
        )

    def split_map(self, programs) -> SplitMap:
        kept = self.tables.kept_pages.cpu().numpy()
        return plan_splits(kept + (kept == 0), programs, len(self.lengths))

    def decode(self, layer=0, *, programs=None, splits=None, stretched=True, sinks=None):
        """Run the kernel with poisoned buffers; returns (output, q, output of ``expected``)."""
        batch = len(self.lengths)
        if splits is None:
            split_map = self.split_map(programs)
        else:
            shape = (len(self.sliding), self.heads)
            programs = splits * batch * self.heads
            split_map = SplitMap(batch, programs, np.full(shape, splits, dtype=np.int64))
        readers = most_readers(self.ratio)
        dispatch = Dispatch.build(split_map, DEVICE, stretched, readers)
        for written in (dispatch.starts, dispatch.pieces, dispatch.merges):
            written.fill_(-(2**30))
        if stretched:
            self.records(dispatch)
        most, sizes = max(dispatch.grid), (batch, self.heads, self.ratio, self.dim)
        workspace = Workspace.build(most, *sizes, dispatch.readers, DEVICE)
        workspace.mid.fill_(torch.nan)
        workspace.lse.fill_(torch.nan)
        q, k_new, v_new = self.inputs(layer)
        out = torch.full_like(q, torch.nan)
        step = self.tensors()
        dispatch_step(dispatch, self.tables, *step)
        decode_attention(
            q,
            k_new,
            v_new,
            self.pool,
            self.table,
            tables=self.tables,
            dispatch=dispatch,
            workspace=workspace,
            layer=layer,
            out=out,
            scaling=self.scaling,
            sinks=sinks,
        )
        self.dispatch = dispatch
        return out, self.expected(q, layer, sinks)

    def expected(self, q, layer, sinks=None):
        """fp64, one head after the other; padding is 0."""
        out = torch.zeros(q.shape, dtype=torch.float64, device=DEVICE)
        for (i, b, h), k in self.k.items():
            if i != layer:
                continue
            for g in range(h * self.ratio, (h + 1) * self.ratio):
                logits = k.double() @ q[b, g].double() * self.scaling
                if sinks is not None:
                    logits = torch.cat([logits, sinks[g : g + 1].double()])
                weights = logits.softmax(dim=0)[: len(k)]
                out[b, g] = weights @ self.v[i, b, h].double()
        return out


def assert_close(found, expected):
    """RMS error relative to the expected values; NaN never passes."""
    tolerance = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[found.dtype]
    error = (found.double() - expected).norm() / expected.norm().clamp(min=1e-30)
    print(f"relative error {error:.2e}, {tolerance} allowed")
    assert error <= tolerance, f"relative error {error:.3e}"
