"""Conversations that take turns: what is asked, in which order, and what a system made of it.

Knows no server: ``play`` is given a coroutine that sends one request.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """The traffic, in tokens.

    Attributes:
        conversations, turns: how many, and how many turns each has.
        first: tokens of a conversation's first prompt.
        more: tokens that each later turn adds to the history.
        answer: tokens generated in each turn.
        times: how often the finished conversations fill the uncompressed pool.
    """

    conversations: int
    turns: int
    first: int
    more: int
    answer: int
    times: float

    def __post_init__(self):
        for name in ("conversations", "turns", "first", "more", "answer"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: expected at least 1")
        if self.pool_tokens < self.length:
            raise ValueError(
                f"an uncompressed pool of {self.pool_tokens} tokens cannot hold one conversation of "
                f"{self.length}: ask for more conversations or a smaller --times"
            )

    @property
    def length(self) -> int:
        """Tokens of one finished conversation."""
        return self.first + (self.turns - 1) * self.more + self.turns * self.answer

    @property
    def pool_tokens(self) -> int:
        """Tokens of the uncompressed pool."""
        return int(self.conversations * self.length / self.times)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts together."""
        step = self.more + self.answer
        return self.conversations * sum(self.first + i * step for i in range(self.turns))


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server said of one request."""

    prompt_tokens: int
    cached_tokens: int
    output_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Prompts, [conversation][turn] token ids, and whose turn it is, one entry a request."""

    prompts: tuple[tuple[tuple[int, ...], ...], ...]
    order: tuple[int, ...]


def traffic(sizes: Sizes, vocabulary: Sequence[int], order: str, seed: int) -> Traffic:
    """Random tokens, so that no conversation begins as another one does.

    Args:
        vocabulary: tokens to draw from.
        order: ``random``, or ``rounds``: turn 1 of all conversations, then turn 2 of all, ...
        seed: of both the tokens and the order.
    """
    rng = random.Random(seed)
    lengths = [sizes.first, *[sizes.more] * (sizes.turns - 1)]
    prompts = tuple(
        tuple(tuple(rng.choices(vocabulary, k=n)) for n in lengths)
        for _ in range(sizes.conversations)
    )
    turns = list(range(sizes.conversations)) * sizes.turns
    if order == "random":
        rng.shuffle(turns)
    return Traffic(prompts, tuple(turns))


async def play(
    asked: Traffic, ask: Callable[[list[int]], Awaitable[Answer]], concurrency: int
) -> list[list[Answer]]:
    """Send all requests, at most ``concurrency`` at once; answers by conversation and turn.

    Requests start in the order of the traffic; a turn whose conversation is still being answered
    waits, and those behind it wait as well.
    """
    slots = asyncio.Semaphore(concurrency)
    locks = [asyncio.Lock() for _ in asked.prompts]
    histories: list[list[int]] = [[] for _ in asked.prompts]
    answers: list[list[Answer]] = [[] for _ in asked.prompts]

    async def turn(i: int) -> None:
        # both let in those who wait for them one by one; the slot first, or the turns of one
        # conversation would leave the queue and the order would become that of rounds
        async with slots, locks[i]:
            prompt = histories[i] + list(asked.prompts[i][len(answers[i])])
            answer = await ask(prompt)
            histories[i] = prompt + list(answer.output_ids)
            answers[i].append(answer)

    await asyncio.gather(*(turn(i) for i in asked.order))
    return answers


def totals(answers: list[list[Answer]]) -> dict[str, float]:
    """Tokens over all requests; a token is prefilled or it came from the cache."""
    flat = [a for turns in answers for a in turns]
    prompt = sum(a.prompt_tokens for a in flat)
    cached = sum(a.cached_tokens for a in flat)
    return {
        "requests": len(flat),
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "hit_rate": cached / prompt,
        "prefilled_tokens": prompt - cached,
    }


def first_difference(ours: list[list[Answer]], theirs: list[list[Answer]]) -> list[int | None]:
    """For each conversation, the first turn that was answered otherwise, or None."""
    return [
        next(
            (k for k, (a, b) in enumerate(zip(x, y, strict=True)) if a.output_ids != b.output_ids),
            None,
        )
        for x, y in zip(ours, theirs, strict=True)
    ]
