"""Offline throughput of whole servers: as many requests as saturate a pool, all there at once.

    python -m bench.offline [--cases short mid long concurrency] [--repeats 3]

`short` has prompts of 16K tokens, `mid` 48K, `long` 120K, and answers of 128. `tokens_per_s` counts
prompts and answers, `peak_running` is the largest value of SGLang's gauge sglang:num_running_reqs,
sampled during the run; `median_itl_ms` is the median time between two tokens of an answer.
`concurrency` asks how many requests of 32K fit and run: there `peak_running` is what is compared with
stock.

Prompts are unrelated; `hit_rate` says that nothing was reused. With prompts this long and answers this
short most of the time is prefill.
"""

from dataclasses import dataclass

from bench import client
from bench.experiment import Bench, bench, parser
from bench.gauge import Gauge

MODULE = "bench.offline"
POOL_TOKENS, RUNNING = 152_000, 64  # 20 GB of Llama-3.1-8B


@dataclass(frozen=True)
class Case:
    """Unrelated requests of one length, in tokens."""

    requests: int
    input_len: int
    output_len: int


CASES = {
    "short": Case(32, 16_384, 128),
    "mid": Case(12, 49_152, 128),
    "long": Case(5, 122_880, 128),
    "concurrency": Case(24, 32_768, 256),
}


def figures(result: dict, peak: float) -> dict[str, float]:
    """Of one run."""
    tokens, cached = sum(result["input_lens"]), sum(result["cached_tokens"])
    return {
        "tokens_per_s": (tokens + sum(result["output_lens"])) / result["duration"],
        "peak_running": peak,
        "requests_per_s": result["completed"] / result["duration"],
        "duration_s": result["duration"],
        "mean_ttft_s": result["mean_ttft_ms"] / 1e3,
        "median_itl_ms": result["median_itl_ms"],
        "hit_rate": cached / tokens,
    }


def measure(now: Bench, server, case: Case, seed: int) -> dict[str, float]:
    flags = client.random_load(
        case.requests, now.length(case.input_len), now.length(case.output_len)
    )
    with Gauge(server.url, "sglang:num_running_reqs") as running:
        result = now.load(server, flags, seed)
    return figures(result, running.peak)


def main() -> None:
    options = parser(MODULE, __doc__, POOL_TOKENS, RUNNING)
    options.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options.add_argument("--requests", type=int, help="of every case, instead of its own number")
    options = options.parse_args()
    with bench(MODULE, options) as now:
        for entry, server in now.servers(now.entries()):
            for name in options.cases:
                case = CASES[name]
                if options.requests:
                    case = Case(options.requests, case.input_len, case.output_len)
                runs = now.runs(lambda seed: measure(now, server, case, seed))  # noqa: B023
                now.report.add(
                    entry,
                    name,
                    {
                        "requests": case.requests,
                        "input_len": now.length(case.input_len),
                        "output_len": now.length(case.output_len),
                    },
                    runs,
                    main="peak_running" if name == "concurrency" else "tokens_per_s",
                )


if __name__ == "__main__":
    main()
