"""bench/traffic.py and bench/prefix_traffic.py: what is asked, and what the table says of it."""

import asyncio
from collections import Counter

import pytest

from bench.prefix_traffic import table, verdict
from bench.traffic import Answer, Sizes, play, totals, traffic

SIZES = Sizes(conversations=5, turns=3, first=11, more=7, answer=2, times=3.0)


def test_sizes_add_up_to_what_is_sent():
    assert SIZES.length == 11 + 2 + 7 + 2 + 7 + 2
    assert SIZES.pool_tokens == 5 * SIZES.length // 3
    assert SIZES.prompt_tokens == 5 * (11 + 20 + 29)


def test_a_pool_that_cannot_hold_one_conversation_is_refused():
    with pytest.raises(ValueError, match="cannot hold one conversation of 31"):
        Sizes(conversations=2, turns=3, first=11, more=7, answer=2, times=3.0)


@pytest.mark.parametrize("order", ["random", "rounds"])
def test_every_conversation_gets_its_turns(order):
    asked = traffic(SIZES, range(100), order, seed=1)
    assert Counter(asked.order) == dict.fromkeys(range(5), 3)
    assert (asked.order == (0, 1, 2, 3, 4) * 3) == (order == "rounds")
    assert [[len(p) for p in c] for c in asked.prompts] == [[11, 7, 7]] * 5
    assert len({c[0] for c in asked.prompts}) == 5
    assert asked == traffic(SIZES, range(100), order, seed=1)
    assert asked != traffic(SIZES, range(100), order, seed=2)


class Server:
    """Answers with the prompt's length and keeps every prompt that it has seen."""

    def __init__(self):
        self.begun: list[list[int]] = []
        self.seen: list[tuple[int, ...]] = []
        self.running = self.most = 0

    async def ask(self, prompt: list[int]) -> Answer:
        self.begun.append(prompt)
        self.running += 1
        self.most = max(self.most, self.running)
        for _ in range(1 + len(self.seen) % 3):
            await asyncio.sleep(0)
        self.running -= 1
        known = [len(p) for p in self.seen if tuple(prompt[: len(p)]) == p]
        self.seen.append((*prompt, -1))
        return Answer(len(prompt), max(known, default=0), (-1, -2))


def by_turn(place: tuple[int, int]) -> tuple[int, int]:
    return place[1], place[0]


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_turn_repeats_all_that_was_said_before(concurrency):
    server = Server()
    asked = traffic(SIZES, range(100), "random", seed=1)
    answers = asyncio.run(play(asked, server.ask, concurrency))
    assert server.most == concurrency
    whose = {c[0]: i for i, c in enumerate(asked.prompts)}
    begun = [whose[tuple(prompt[: SIZES.first])] for prompt in server.begun]
    # a turn waits for the one before it, never for more than the requests that run beside it
    places = zip(
        sorted(enumerate(begun), key=by_turn),
        sorted(enumerate(asked.order), key=by_turn),
        strict=True,
    )
    assert all(x == y and abs(i - j) < concurrency for (i, x), (j, y) in places)
    assert [[a.prompt_tokens for a in turns] for turns in answers] == [[11, 20, 29]] * 5
    # prompt and first answer token are known
    assert [[a.cached_tokens for a in turns] for turns in answers] == [[0, 12, 21]] * 5
    assert totals(answers) == {
        "requests": 15,
        "prompt_tokens": SIZES.prompt_tokens,
        "cached_tokens": 5 * 33,
        "hit_rate": 33 / 60,
        "prefilled_tokens": 5 * 27,
    }


def test_one_conversation_may_be_answered_otherwise_and_no_more():
    one, other = [[Answer(1, 0, (5,))]], [[Answer(1, 0, (6,))]]
    assert verdict(one * 3, one * 3) == (
        True,
        "3 of 3 conversations have the same greedy answers",
    )
    assert verdict(one * 3, one * 2 + other)[0]
    assert verdict(one * 3, one + other * 2) == (
        False,
        "1 of 3 conversations have the same greedy answers",
    )


def test_the_table_has_a_column_for_every_figure():
    row = {
        **{"system": "tangram", "retention": "0.3", "pool_bytes": 4096},
        **totals([[Answer(8, 6, ())]]),
        **{"retractions": 2, "seconds": 1.5},
    }
    head, line = table([row]).splitlines()
    expected = ["tangram", "0.3", "4096", "1", "8", "6", "0.750", "2", "2", "1.5"]
    assert line.split() == expected
    assert len(head.split()) == len(expected)
    assert len(head) == len(line)
