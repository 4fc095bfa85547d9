"""bench/branches.py: exact KL from hidden states, which queries are compared, and the means."""

import math

import pytest
import torch
from safetensors.torch import save_file

from bench.branch_engine import Seen, run_scheduler_without_going_back
from bench.branches import Case, GateError, _checked, table
from bench.divergence import Head, Point, summary
from bench.documents import Document
from tangram_sglang.cache.trie import WindowTrie
from tests.cache.test_trie import TOKENS, Pool

# log-probabilities of one-hot hidden states are the rows of this table
CHANCES = torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.75, 0.125]])


@pytest.fixture(params=["lm_head.weight", "model.embed_tokens.weight"])
def head(request, tmp_path):
    save_file({request.param: CHANCES.log().T.contiguous()}, tmp_path / "model.safetensors")
    return Head.of(tmp_path)


def test_kl_is_over_the_whole_vocabulary(head):
    hidden = torch.eye(2)[[0] * 70 + [1] * 70]
    swapped = torch.eye(2)[[1] * 70 + [0] * 70]
    forth = 0.5 * math.log(4) + 0.25 * math.log(1 / 3) + 0.25 * math.log(2)
    back = 0.125 * math.log(1 / 4) + 0.75 * math.log(3) + 0.125 * math.log(1 / 2)
    expected = torch.tensor([forth] * 70 + [back] * 70)
    torch.testing.assert_close(head.kl(hidden, swapped), expected)
    assert float(head.kl(hidden, hidden).abs().max()) == 0.0
    with pytest.raises(ValueError, match="hidden states"):
        head.kl(hidden, swapped[1:])


def seen(logprobs, cached=16) -> Seen:
    """Queries from token 16 on; SGLang gave log-probabilities behind token 20."""
    return Seen(cached, torch.eye(2)[[0, 0, 0, 0, 0, 1, 0, 1]], logprobs, 20, ())


@pytest.fixture
def case():
    document = Document("d", "prose", (0,) * 21 + (1, 2, 0, 1))
    return Case(document, tuple(range(100, 200)), border=16, window=16, recent=4)


def test_a_run_counts_only_with_the_logprobs_that_sglang_gave(head, case):
    # tokens 21.. are 1, 2, 0: seen by the queries 20, 21, 22
    right = tuple(math.log(p) for p in (0.25, 0.125, 0.5))
    run = seen(right)
    assert _checked(run, case, head, cached=16) is run
    with pytest.raises(GateError, match="differ by"):
        _checked(seen((*right[:2], math.log(0.49))), case, head, cached=16)
    with pytest.raises(GateError, match="16 cached tokens, expected 0"):
        _checked(run, case, head, cached=0)
    assert run.queries(17, 20).shape == (3, 2)
    with pytest.raises(ValueError, match="token 15 was not computed: 16 tokens were cached"):
        run.queries(15, 20)


def test_the_other_request_leaves_the_document_late_and_seals_what_it_shares():
    window, recent, border = 512, 256, 2048
    document = Document("d", "prose", tuple(range(10_000, 12_560)))
    case = Case(document, tuple(range(2_560)), border, window, recent)
    shared = [a == b for a, b in zip(case.another, document.ids, strict=False)]
    assert sum(shared) == border + 100
    # its raw tail begins behind the document: all windows that it shares are sealed
    tail = (len(case.another) - 1 - recent) // window * window
    assert tail >= border + 100
    assert case.longest == border + recent + 256 == len(document.ids)


POINTS = [
    Point("a", "branch", 0, (0, 256), 1536, 512, kl_cold=0.010, kl=0.012),
    Point("b", "branch", 0, (0, 256), 1536, 512, kl_cold=0.030, kl=0.024),
]


def test_means_and_ratios_over_documents():
    assert summary(POINTS) == pytest.approx(
        {
            **{"kl_cold": 0.020, "kl": 0.018, "ratio": 0.9},
            **{"lowest": 0.8, "highest": 1.2, "geometric": 0.96**0.5, "given_up": 512},
        }
    )


def test_the_table_has_a_part_for_each_way_and_range():
    other = Point("a", "not going back", 0, (256, 512), 2048, 0, kl_cold=0.010, kl=0.011)
    first, second = table([*POINTS, other]).split("\n\n")
    assert first.splitlines()[0].startswith("branch: M = border + 0, queries 0 to 256")
    assert first.splitlines()[-1].split()[:5] == ["mean", "20.00", "18.00", "0.900", "512"]
    assert second.splitlines()[-1].split()[:5] == ["mean", "10.00", "11.00", "1.100", "0"]


def test_the_scheduler_that_does_not_go_back_takes_every_window(monkeypatch):
    """Behind 40 tokens, 4 windows of 8, the last of which hold R = 4: one is given up, or none."""
    from sglang.srt.managers import scheduler

    found = {}

    def run(name):
        pool = Pool()
        pool.publish(TOKENS[:40])
        # another document behind the same windows: no raw tail matches
        found[name] = pool.match((*TOKENS[:32], *range(200, 260)))

    monkeypatch.setattr(scheduler, "run_scheduler_process", run)
    monkeypatch.setattr(WindowTrie, "__init__", WindowTrie.__init__)
    run("going back")
    run_scheduler_without_going_back("not going back")
    assert found["not going back"].tokens - found["going back"].tokens == 8
    assert found["not going back"].given_up == 0 < found["going back"].given_up
