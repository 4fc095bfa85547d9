"""Running totals of what a pool did; plain numbers that someone else may export."""

from dataclasses import dataclass


@dataclass(slots=True)
class Tally:
    """Counts since the pool was made; a retracted request that comes back counts again.

    Attributes:
        admissions: requests that got a row.
        hits: of these, requests that started from cached tokens.
        hit_tokens: true tokens they started from.
        branches: admissions that found more in the cache than they could start from.
        given_up_tokens: cached true tokens that branches computed again.
        windows_sealed: windows of one request each, sealed in all its heads.
        compression_s: seconds spent to score them, to pick tokens and to write what is kept.
        evicted_pages: pages that the prefix cache gave back.
    """

    admissions: int = 0
    hits: int = 0
    hit_tokens: int = 0
    branches: int = 0
    given_up_tokens: int = 0
    windows_sealed: int = 0
    compression_s: float = 0.0
    evicted_pages: int = 0

    def compressed(self, seconds: float) -> None:
        """Count time spent on compression."""
        self.compression_s += seconds

    def admitted(self, cached_tokens: int, given_up: int) -> None:
        """Count a request that starts behind ``cached_tokens``."""
        self.admissions += 1
        self.hits += cached_tokens > 0
        self.hit_tokens += cached_tokens
        self.branches += given_up > 0
        self.given_up_tokens += given_up
