"""What a branch costs: KL to full KV behind a prefix hit that finds no raw tail, beside a cold run's.

    python -m bench.branches [--documents 8] [--retention 0.3] [--out bench/results/branches.csv]

Eight documents (`bench/documents.py`), each run through SGLang itself four times: on full KV
(retention 1.0), cold, as a branch, and with a trie that does not go back a window. For a branch
another request has run the document to token M and something else behind it, long enough that the
raw tokens before M are gone. The document's own continuation follows M, so all runs see the same
tokens. M lies right at a window border, where the hit has no raw token at all, and 100 tokens
behind it; both find the same windows, so one run has the queries of both.

`regenerated`: the cached request ended at M and generated an answer, which is thrown away.
`not going back`: the branch starts from all windows that matched. Design 3 asks what that costs where
at least R prompt tokens follow the hit; then only the queries behind these matter.

KL is exact, over the whole vocabulary: SGLang returns the final hidden states of every query, and
the table is printed only if they give the log-probabilities that SGLang itself returned, and if a
branch at retention 1.0 is full KV.
"""

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.branch_engine import BranchEngine, Seen
from bench.divergence import Head, Point, summary
from bench.documents import SOURCES, Document, load
from bench.record import RESULTS, append_csv, machine, say
from bench.smollm2 import MODEL_DIR
from tangram_sglang.cli.demo import PLANS, nearest_plan
from tangram_sglang.cli.retention import retention
from tangram_sglang.plan.file import load_plan
from tangram_sglang.settings import Settings

QUERIES = 256  # measured behind each branch
OFFSETS = (0, 100)  # of M behind the window border
WAYS = ("branch", "regenerated", "not going back")
# float32 sums in another order; the hidden states pass through text as well
LOGPROB_TOLERANCE = 1e-3
FULL_KV_TOLERANCE = 1e-5


class GateError(RuntimeError):
    """The figures would not mean what the table says."""


@dataclass(frozen=True, slots=True)
class Case:
    """One document and where others leave it.

    Attributes:
        document: its tokens reach past every measured query.
        other: what another request went on with.
        border: a multiple of the window.
        window, recent: W and R.
    """

    document: Document
    other: tuple[int, ...]
    border: int
    window: int
    recent: int

    @property
    def another(self) -> tuple[int, ...]:
        """The request that leaves sealed windows and no raw token of the document behind.

        Its last token sees the windows around the border sealed when more than W + R tokens follow
        the text that is shared, wherever in a window that ends.
        """
        shared = self.document.ids[: self.border + max(OFFSETS)]
        return shared + self.other[: self.window + self.recent + self.window // 8]

    @property
    def after_recent(self) -> tuple[int, int]:
        """Queries behind R prompt tokens, relative to the border."""
        return self.recent, self.recent + QUERIES

    @property
    def longest(self) -> int:
        return self.border + max(max(OFFSETS) + QUERIES, self.after_recent[1])


def measure(cases: list[Case], size: argparse.Namespace) -> Iterator[Point]:
    head = Head.of(size.model)
    plan = {"TANGRAM_PLAN": str(size.plan)}
    compressed = {**plan, "TANGRAM_RETENTION": f"{size.retention:g}"}

    full: list[Seen] = []
    with _engine("full KV", size.model, {**plan, "TANGRAM_RETENTION": "1.0"}) as engine:
        for case in cases:
            full.append(_cold(engine, case, head))
            if case is cases[0]:
                _check_branch_of_full_kv(case, full[0], _branch(engine, case, head, 1), head)
            _progress(case, "full KV")

    def point(i, way, leaves, queries, cold, seen) -> Point:
        begin, end = (cases[i].border + q for q in queries)
        kept = full[i].queries(begin, end)
        return Point(
            cases[i].document.name,
            *(way, leaves, queries, seen.cached),
            max(0, cases[i].border - seen.cached),
            float(head.kl(kept, cold.queries(begin, end)).mean()),
            float(head.kl(kept, seen.queries(begin, end)).mean()),
        )

    colds: list[Seen] = []
    with _engine(f"retention {size.retention:g}", size.model, compressed) as engine:
        for i, case in enumerate(cases):
            colds.append(_cold(engine, case, head))
            seen = _branch(engine, case, head, 1)
            for offset in OFFSETS:
                yield point(i, WAYS[0], offset, (offset, offset + QUERIES), colds[i], seen)
            yield point(i, WAYS[0], 0, case.after_recent, colds[i], seen)
            for offset, seen in _regenerated(engine, case, head):
                yield point(i, WAYS[1], offset, (offset, offset + QUERIES), colds[i], seen)
            _progress(case, WAYS[1])

    with _engine("not going back", size.model, compressed, go_back=False) as engine:
        for i, case in enumerate(cases):
            seen = _branch(engine, case, head, 0)
            for queries in ((0, QUERIES), case.after_recent):
                yield point(i, WAYS[2], 0, queries, colds[i], seen)
            _progress(case, WAYS[2])


def _cold(engine: BranchEngine, case: Case, head: Head) -> Seen:
    engine.forget()
    seen = engine.see(case.document.ids[: case.longest], case.border)
    return _checked(seen, case, head, cached=0)


def _branch(engine: BranchEngine, case: Case, head: Head, back: int) -> Seen:
    engine.forget()
    engine.say(case.another)
    seen = engine.see(case.document.ids[: case.longest], case.border)
    return _checked(seen, case, head, cached=case.border - back * case.window)


def _regenerated(engine: BranchEngine, case: Case, head: Head) -> Iterator[tuple[int, Seen]]:
    engine.forget()
    for offset in OFFSETS:
        engine.say(case.document.ids[: case.border + offset], tokens=8)
    for offset in OFFSETS:
        leaves = case.border + offset
        seen = engine.see(case.document.ids[: leaves + QUERIES], leaves)
        # all whole pages before M
        page = Settings().page
        yield offset, _checked(seen, case, head, cached=leaves // page * page)


def _checked(seen: Seen, case: Case, head: Head, cached: int) -> Seen:
    if seen.cached != cached:
        raise GateError(f"{case.document.name}: {seen.cached} cached tokens, expected {cached}")
    end = seen.start + len(seen.logprobs)
    tokens = list(case.document.ids[seen.start + 1 : end + 1])
    gap = head.gap(seen.queries(seen.start, end), tokens, seen.logprobs)
    if not gap <= LOGPROB_TOLERANCE:
        raise GateError(
            f"{case.document.name}: hidden states give log-probabilities that differ by {gap:g} "
            f"from SGLang's own, expected at most {LOGPROB_TOLERANCE:g}"
        )
    return seen


def _check_branch_of_full_kv(case: Case, full: Seen, branch: Seen, head: Head) -> None:
    begin, end = case.border, case.longest
    worst = float(head.kl(full.queries(begin, end), branch.queries(begin, end)).max())
    if not worst <= FULL_KV_TOLERANCE:
        raise GateError(f"a branch at retention 1.0 has KL {worst:g} to full KV, expected 0")
    say(f"  gate: a branch at retention 1.0 has KL {worst:.1e} to full KV")


def _engine(what: str, model: Path, settings: dict[str, str], go_back=True) -> BranchEngine:
    say(f"{what}: starting an engine, {settings}")
    return BranchEngine(model, settings, go_back=go_back)


def _progress(case: Case, what: str) -> None:
    say(f"  {time.strftime('%H:%M:%S')} {what}: {case.document.name}")


def table(points: list[Point]) -> str:
    """A line per document and range, then the means; KL in thousandths of a nat."""
    groups = defaultdict(list)
    for p in points:
        groups[p.way, p.leaves, p.queries].append(p)
    lines = []
    for (way, leaves, (begin, end)), group in groups.items():
        lines.append(f"\n{way}: M = border + {leaves}, queries {begin} to {end} behind the border")
        lines.append(
            f"{'KL to full KV x 1000':28}{'cold':>9}{'hit':>9}{'ratio':>8}{'given up':>10}"
        )
        for p in group:
            lines.append(_line(p.document, p.kl_cold, p.kl, p.ratio, p.given_up))
        mean = summary(group)
        lines.append(
            _line("mean", mean["kl_cold"], mean["kl"], mean["ratio"], mean["given_up"])
            + f"   ratios {mean['lowest']:.2f} to {mean['highest']:.2f}, "
            + f"geometric mean {mean['geometric']:.3f}"
        )
    return "\n".join(lines).lstrip("\n")


def _line(name: str, cold: float, kl: float, ratio: float, given_up: float) -> str:
    return f"{name:28}{1000 * cold:9.2f}{1000 * kl:9.2f}{ratio:8.3f}{given_up:10.0f}"


def rows(points: list[Point], cases: list[Case], size: argparse.Namespace) -> list[dict]:
    digests = {case.document.name: case.document.digest for case in cases}
    common = {
        **{"model": size.model.name, "retention": size.retention, "plan": size.plan.name},
        **machine("bench.branches"),
    }
    return [
        {
            **asdict(p),
            "queries": f"{p.queries[0]}-{p.queries[1]}",
            "kl_cold": f"{p.kl_cold:.6f}",
            "kl": f"{p.kl:.6f}",
            "ratio": f"{p.ratio:.4f}",
            "border": size.border,
            "tokens_sha256": digests[p.document],
            **common,
        }
        for p in points
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--retention", type=retention, default=0.3, help="(%(default)s)")
    parser.add_argument("--plan", type=Path, help="default: the nearest shipped plan")
    parser.add_argument(
        "--documents", type=int, default=len(SOURCES), help="how many (%(default)s)"
    )
    parser.add_argument("--border", type=int, default=2048, help="tokens before it (%(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS / "branches.csv", help="(%(default)s)")
    size = parser.parse_args()
    size.plan = size.plan or nearest_plan(PLANS, size.retention)
    return size


def main() -> int:
    size = arguments()
    from transformers import AutoTokenizer

    window, recent = load_plan(size.plan).calibration.window, Settings().recent
    if size.border % window or size.border < 2 * window:
        say(f"error: --border {size.border}: expected at least two windows of {window} tokens")
        return 2
    tokenizer = AutoTokenizer.from_pretrained(size.model)
    documents = load(tokenizer, size.border + recent + QUERIES, size.documents)
    others = [*documents[1:], documents[0]]
    cases = [
        Case(d, other.ids, size.border, window, recent)
        for d, other in zip(documents, others, strict=True)
    ]
    try:
        points = list(measure(cases, size))
    except GateError as error:
        say(f"error: {error}")
        return 1
    print(table(points))
    append_csv(size.out, rows(points, cases, size))
    say(f"written to {size.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
