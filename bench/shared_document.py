"""One document, many users, one question each: what a shared prefix is worth.

    python -m bench.shared_document [--users 128] [--document 65536]

All users ask at once, of a document that no server has seen. The pool holds the document and the
questions and answers of some twenty users uncompressed, so the rest wait; and every decode step reads the
document once per running user. Lengths are those of the issue; only the pool is scaled down.

`answers_per_s` counts finished users. `hit_rate` is the share of prompt tokens that the server took
from its cache.
"""

from bench import client
from bench.experiment import Bench, bench, parser
from bench.gauge import Gauge

MODULE = "bench.shared_document"
POOL_TOKENS, RUNNING = 73_000, 128
QUESTION, ANSWER = 256, 128


def figures(result: dict, peak: float) -> dict[str, float]:
    """Of one run."""
    return {
        "answers_per_s": result["completed"] / result["duration"],
        "tokens_per_s": sum(result["output_lens"]) / result["duration"],
        "peak_running": peak,
        "median_ttft_s": result["median_ttft_ms"] / 1e3,
        "hit_rate": sum(result["cached_tokens"]) / sum(result["input_lens"]),
        "duration_s": result["duration"],
    }


def measure(now: Bench, server, users: int, document: int, seed: int) -> dict[str, float]:
    flags = client.shared_load(
        users, now.length(document), now.length(QUESTION), now.length(ANSWER)
    )
    with Gauge(server.url, "sglang:num_running_reqs") as running:
        result = now.load(server, flags, seed)
    return figures(result, running.peak)


def main() -> None:
    options = parser(MODULE, __doc__, POOL_TOKENS, RUNNING)
    options.add_argument("--users", type=int, default=128)
    options.add_argument("--document", type=int, default=65_536, help="tokens (%(default)s)")
    options = options.parse_args()
    with bench(MODULE, options) as now:
        asked = {
            "users": options.users,
            "document": now.length(options.document),
            "question": now.length(QUESTION),
            "answer": now.length(ANSWER),
        }
        for entry, server in now.servers(now.entries()):
            runs = now.runs(
                lambda seed: measure(now, server, options.users, options.document, seed)  # noqa: B023
            )
            now.report.add(entry, "shared document", asked, runs, main="answers_per_s")


if __name__ == "__main__":
    main()
