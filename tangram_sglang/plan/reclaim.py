"""Compress-and-reclaim: what Budget Reservation is compared with. Not for production.

A prompt is held whole, in the pages of an uncompressed cache, until its last token arrives. Only then are
its windows scored, what is kept written, and the rest given back:

    n < prompt     nothing is sealed, every token is raw
    n >= prompt    sealed as ``WindowRule`` says

So every query of a prompt but the last sees all tokens before it. A request's ``floor`` carries what the
closed forms need to know beside n: it is minus the length of its prompt. The state is then no function
of the tokens alone, so prefixes are not shared.
"""

from dataclasses import dataclass
from typing import ClassVar

from tangram_sglang.plan.window import WindowRule


# methods name the class they extend, as ``super()`` does not work in a dataclass with slots
@dataclass(frozen=True, slots=True)
class ReclaimRule(WindowRule):
    """``WindowRule`` with prompts that are sealed at their end; ``longest``: tokens of a prompt."""

    longest: int
    shares: ClassVar[bool] = False

    def floor(self, prompt: int, windows: int) -> int:
        return -prompt

    def sealed(self, n: int, floor: int = 0) -> int:
        return 0 if n < -floor else WindowRule.sealed(self, n)

    def epoch_end(self, s: int, floor: int = 0) -> int:
        return max(WindowRule.epoch_end(self, s), -floor - 1)

    @property
    def tail_pages(self) -> int:
        return self.pages(max(self.window + self.recent, self.longest))
