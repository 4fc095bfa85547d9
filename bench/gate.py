"""No speed-up without the same answers: ours at retention 1.0 against stock, on the measured servers.

Both answer the same prompts greedily, of lengths below one window and of many. As long as their
histories are equal, the log-probabilities of what they chose must agree within `tolerance`; where they
first choose otherwise, it must be a tie: each within twice that of its own best. What follows has
another history and is not compared.

That passes for a model on which attention has no influence, as dummy weights are (``bench/lively.py``
mends that). So a compressed server must fail it: what it answers must be more than `CONTROL` times the
tolerance away, or nothing was shown and the gate refuses.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from bench.server_api import post

# SGLang's logits are bfloat16: four of its steps between 8 and 16, where `lively.py` puts the largest
TOLERANCE = 0.25
CONTROL = 2.0
NEW_TOKENS = 24
ALTERNATIVES = 8


@dataclass(frozen=True)
class Step:
    """One greedy token: what was chosen, and log-probabilities of it and of the best others."""

    token: int
    top: dict[int, float]

    @property
    def logprob(self) -> float:
        return self.top[self.token]

    @property
    def lowest(self) -> float:
        """No token that is not listed is likelier."""
        return min(self.top.values())


@dataclass(frozen=True)
class Verdict:
    """What the gate found.

    Attributes:
        passed: whether speed-ups may be printed.
        text: why, for the CSV file.
    """

    passed: bool
    text: str


def lengths(window: int) -> tuple[int, ...]:
    """Prompts of half a window up to twelve."""
    return tuple(max(1, int(x * window)) for x in (0.5, 2.2, 5, 12))


def prompts(vocabulary: int, sizes: Sequence[int], seed: int = 5) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    # the first tokens of a vocabulary are special ones
    return [rng.integers(8, vocabulary, n).tolist() for n in sizes]


def greedy(url: str, prompt: Sequence[int], new_tokens: int = NEW_TOKENS) -> list[Step]:
    answer = post(
        f"{url}/generate",
        {
            "input_ids": list(prompt),
            "sampling_params": {
                **{"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
            },
            "return_logprob": True,
            "top_logprobs_num": ALTERNATIVES,
        },
    )
    meta = answer["meta_info"]
    return [
        Step(token, {**{t: p for p, t, _ in top}, token: logprob})
        for (logprob, token, _), top in zip(
            meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True
        )
    ]


def distance(one: Sequence[Step], other: Sequence[Step]) -> float:
    """Largest difference of log-probabilities while the histories are equal.

    Where the two first choose otherwise: half of how much worse either finds the other's choice.
    """
    worst = 0.0
    for a, b in zip(one, other, strict=True):
        if a.token != b.token:
            gaps = (x.logprob - x.top.get(y.token, x.lowest) for x, y in ((a, b), (b, a)))
            return max(worst, *(gap / 2 for gap in gaps))
        worst = max(worst, abs(a.logprob - b.logprob))
    return worst


def judge(same: Sequence[float], control: Sequence[float], tolerance: float) -> Verdict:
    """``same``: distances of uncompressed answers from stock's; ``control``: of compressed ones."""
    found = f"{max(same):.3f} from stock, compressed {max(control):.3f}, tolerance {tolerance:g}"
    if not max(same) <= tolerance:  # also where it is not a number
        return Verdict(False, f"failed: {found}")
    if not max(control) >= CONTROL * tolerance:
        return Verdict(False, f"shows nothing, attention has too little influence: {found}")
    return Verdict(True, f"passed: {found}")


def check(
    stock: str, whole: str, compressed: str, asked: Sequence[Sequence[int]], tolerance: float
) -> Verdict:
    """Ask three servers, named by their addresses; each decodes all prompts together."""
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = {
            url: list(pool.map(partial(greedy, url), asked)) for url in (stock, whole, compressed)
        }
    return judge(
        *(
            [distance(x, y) for x, y in zip(answers[stock], answers[url], strict=True)]
            for url in (whole, compressed)
        ),
        tolerance,
    )
