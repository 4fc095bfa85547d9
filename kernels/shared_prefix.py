"""Requests that read their first sealed windows together, and the records that say so to kernels.

Requests behind the same cached prefix name the same pages. A matrix multiplication has 16 lines and
one request fills G of them, so a program can have the queries of several requests, its readers, at the
pages it fetches, at no more cost than those of one. The first reader is the leader.

    record of request b:  LEADER, LINE, WINDOWS, then R readers
        leader   a request of the batch, b itself where it leads or reads alone
        line     b's number among the readers of its leader
        windows  sealed windows that they read together; 0 alone
        readers  of a leader, in order; -1 where there is none
"""

from collections.abc import Sequence

import numpy as np
import triton

# lines of a matrix multiplication
LINES = 16
# more readers cost a larger workspace; four already leave a quarter of the bytes
MOST = 4

LEADER, LINE, WINDOWS, READERS = range(4)


def most_readers(ratio: int) -> int:
    """R, for ``ratio`` query heads per KV head; 1 where the lines are those of one request."""
    return max(1, min(MOST, LINES // ratio))


def lines_for(ratio: int) -> int:
    """Lines of a tile of queries."""
    return max(LINES, triton.next_power_of_2(ratio))


def alone(batch: int, readers: int) -> np.ndarray:
    """[batch, 3 + R] int32, records of requests that share nothing."""
    records = np.full((batch, READERS + readers), -1, dtype=np.int32)
    records[:, LEADER] = np.arange(batch)
    records[:, LINE] = records[:, WINDOWS] = 0
    return records


def read_together(records: np.ndarray, requests: Sequence[int], windows: int) -> None:
    """Write into ``records`` that ``requests``, two to R, read ``windows`` together; the first leads."""
    requests = np.asarray(requests)
    records[requests, LEADER] = requests[0]
    records[requests, LINE] = np.arange(len(requests))
    records[requests, WINDOWS] = windows
    records[requests[0], READERS : READERS + len(requests)] = requests
