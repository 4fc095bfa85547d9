"""Time to first token against arrival rate: requests of 20K to 40K tokens, 30K in the mean.

    python -m bench.arrival [--rates 0.2 0.3 0.4] [--requests 20]

Requests arrive at random intervals, and every server gets the same ones at the same moments. Rates are
in requests a second and go up. A server's higher rates are left out once its mean time to first token
passes `--enough-s`: the queue only grows then, and takes the time of the others.

What is compared with stock, at the same rate, is the mean time to first token.
"""

from bench import client
from bench.experiment import Bench, bench, parser
from bench.record import say

MODULE = "bench.arrival"
POOL_TOKENS, RUNNING = 152_000, 64
LONGEST, LEAST = 40_000, 0.5


def figures(result: dict) -> dict[str, float]:
    """Of one run."""
    return {
        "mean_ttft_s": result["mean_ttft_ms"] / 1e3,
        "median_ttft_s": result["median_ttft_ms"] / 1e3,
        "p99_ttft_s": result["p99_ttft_ms"] / 1e3,
        "requests_per_s": result["completed"] / result["duration"],
        "duration_s": result["duration"],
        "hit_rate": sum(result["cached_tokens"]) / sum(result["input_lens"]),
    }


def measure(now: Bench, server, rate: float, seed: int) -> dict[str, float]:
    options = now.options
    flags = client.random_load(
        options.requests, now.length(LONGEST), now.length(options.output_len), LEAST
    )
    return figures(now.load(server, [*flags, "--request-rate", f"{rate:g}"], seed))


def main() -> None:
    options = parser(MODULE, __doc__, POOL_TOKENS, RUNNING)
    options.add_argument("--rates", type=float, nargs="+", default=[0.2, 0.3, 0.4])
    options.add_argument("--requests", type=int, default=20, help="at each rate (%(default)s)")
    options.add_argument("--output-len", type=int, default=512, help="longest (%(default)s)")
    options.add_argument("--enough-s", type=float, default=20)
    options = options.parse_args()
    with bench(MODULE, options) as now:
        for entry, server in now.servers(now.entries()):
            for rate in sorted(options.rates):
                runs = now.runs(lambda seed: measure(now, server, rate, seed))  # noqa: B023
                asked = {
                    **{"rate": rate, "requests": options.requests},
                    **{"mean_input": now.length(LONGEST * (1 + LEAST) / 2)},
                    "longest_output": now.length(options.output_len),
                }
                now.report.add(
                    entry, f"{rate:g}/s", asked, runs, "mean_ttft_s", lower_is_better=True
                )
                if any(run["mean_ttft_s"] > options.enough_s for run in runs):
                    say(f"{entry.name}: higher rates are left out")
                    break


if __name__ == "__main__":
    main()
