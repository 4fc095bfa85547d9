"""How a request's tokens fall into sealed windows and a raw tail (docs/design.md).

    0          W         2W    ...   sW                n
    | window 0 | window 1 | ... | s-1 |    raw tail     |
      sealed: K[g] entries each         one entry a token

``s`` is a function of the number of tokens alone, so what is kept does not depend on how the
tokens were scheduled.
"""

from dataclasses import dataclass
from typing import ClassVar

from tangram_sglang.errors import TangramError


@dataclass(frozen=True, slots=True)
class WindowRule:
    """W, R, P and the sinks; all in tokens.

    Attributes:
        window: W, tokens that are sealed together; a multiple of P.
        recent: R, tokens that must follow a window before it is sealed.
        page: P, tokens per page.
        sinks: first tokens of a request that every head keeps; at most P.
        shares: whether the state is a function of the tokens, so that requests can share it.
    """

    window: int
    recent: int
    page: int
    sinks: int
    shares: ClassVar[bool] = True

    def __post_init__(self):
        if self.window % self.page:
            raise TangramError(
                f"window of {self.window} tokens is no multiple of the page of {self.page}: a page "
                "must belong to one window; choose TANGRAM_WINDOW as a multiple of TANGRAM_PAGE"
            )
        if self.sinks > self.page:
            raise TangramError(
                f"{self.sinks} sinks exceed the page of {self.page} tokens, the least a head "
                f"keeps of a window; lower TANGRAM_SINKS to {self.page} or less"
            )

    def floor(self, prompt: int, windows: int) -> int:
        """What closed forms take for a request of ``prompt`` tokens behind ``windows`` cached ones."""
        return windows

    def sealed(self, n: int, floor: int = 0) -> int:
        """Windows that the last of ``n`` tokens sees sealed.

        Window j is sealed once (j+1)W + R tokens came before a query. The token that completes
        that count still sees the window raw, so sealing runs with the token after it. A request
        that starts from ``floor`` windows of the prefix cache never sees fewer.
        """
        return max(floor, (n - 1 - self.recent) // self.window)

    def epoch_end(self, s: int, floor: int = 0) -> int:
        """First position whose query sees more than ``s`` sealed windows."""
        return (s + 1) * self.window + self.recent

    def pages(self, tokens: int) -> int:
        """Pages that ``tokens`` entries fill."""
        return -(-tokens // self.page)

    @property
    def tail_pages(self) -> int:
        """Most pages a raw tail takes in one group."""
        return self.pages(self.window + self.recent)
