"""Runs the tangram backend in a scheduler of its own, watched at every step."""

from tests import probes
from tests.harness import Req, Result, run_scenario

# small windows, so that a few hundred tokens seal many of them
TINY_ENV = {"TANGRAM_WINDOW": "32", "TANGRAM_RECENT": "16", "TANGRAM_PAGE": "4"}


def serve(
    model_path,
    requests: list[Req],
    *,
    env=None,
    overlap=False,
    on_step=None,
    script=None,
    fresh=False,
    collect=None,
    gpu=False,
    **args,
):
    """One scenario; the books are checked at every step, and all pages are free at its end."""
    result = run_scenario(
        model_path,
        requests,
        server_args={"attention_backend": "tangram", **args},
        env=TINY_ENV if env is None else env,
        overlap=overlap,
        on_step=on_step or probes.watch,
        script=script,
        collect=collect or probes.collect,
        timeout_s=300,
        fresh=fresh,
        gpu=gpu,
    )
    books = result.collected
    assert books["free"] + books["cached"] == books["total"], "pages are missing at the end"
    assert books["live"] == 0 and books["locked"] == 0
    return result


def assert_reserved_exactly(result: Result) -> None:
    """Predicted pages were held at every step; only sealing and sliding gave any back."""
    rows = [row for record in result.records for row in record["rows"].values()]
    assert rows, "nothing ran"
    assert all(held == predicted for _, held, predicted in rows)
    returned = result.collected["returned"]
    assert returned["given"] == returned["explained"]


def assert_same_kept(kept: dict, expected: dict, scores: dict | None = None, allowed: int = 0):
    """Kept positions agree; up to ``allowed`` heads may differ, by ties within rounding only.

    Args:
        kept, expected: positions by (layer, head, window).
        scores: [W] by the same keys, to tell a tie.
    """
    assert kept.keys() >= expected.keys()
    differing = [key for key in expected if kept[key] != expected[key]]
    for key in differing:
        swapped = set(kept[key]) ^ set(expected[key])
        assert scores is not None, f"{key} keeps other positions"
        window = scores[key]
        values = [float(window[p - key[2] * len(window)]) for p in swapped]
        spread = float(max(window) - min(window))
        gap = max(values) - min(values)
        assert gap <= 1e-4 * spread, f"{key}: positions {sorted(swapped)} are no tie, gap {gap}"
    assert len(differing) <= allowed, f"{len(differing)} heads differ by ties: {differing}"


def logprob_gap(result: Result | dict, expected: Result | dict) -> float:
    """Largest gap of the log-probabilities of answers, chosen tokens and top ones alike.

    Top values are compared in order: two tokens that are close may change places. ``result`` may
    hold more requests than ``expected``.
    """
    gap = 0.0
    wanted = expected if isinstance(expected, dict) else expected.outputs
    for rid, want in wanted.items():
        found = result[rid]
        assert len(found.logprobs) == len(want.logprobs) == len(want.output_ids) > 0
        pairs = [*zip(found.logprobs, want.logprobs, strict=True)]
        for mine, theirs in zip(found.top_logprobs, want.top_logprobs, strict=True):
            pairs += zip(sorted(mine.values()), sorted(theirs.values()), strict=True)
        gap = max(gap, *(abs(a - b) for a, b in pairs))
    print(f"log-probabilities differ by {gap:.1e} at most")
    return gap
