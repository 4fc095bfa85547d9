"""Tokens per second of `tangram` and of SGLang's `torch_native`, side by side on this CPU.

    python -m bench.cpu_throughput [--repeats 3] [--retention 1.0 0.5 0.25]

Starts one server after the other with the same flags but for the backend, and sends each the same
requests. No prompt begins as another one does, so that no prefix cache takes part. Prints a table of
medians with the ratio to torch_native, and appends a line per figure to a CSV file.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from bench.record import RESULTS, append_csv, machine, say
from bench.smollm2 import MODEL_DIR
from tangram_sglang.cli.demo import DOCUMENT, PLANS, TEXTS, nearest_plan
from tangram_sglang.cli.retention import retention
from tangram_sglang.cli.server import Server, cpu_arguments, cpu_environment

BASELINE = "torch_native"
REQUEST_TIMEOUT_S = 900

METRICS = {
    "prefill": "prompt tokens/s of one long prompt",
    "decode": "new tokens/s after that prompt",
    "decode_batch": "new tokens/s of all requests decoding together",
}


@dataclass(frozen=True, slots=True)
class Variant:
    """A server to measure: a backend, and for tangram the retention it runs at."""

    backend: str
    retention: float | None = None

    @property
    def name(self) -> str:
        return self.backend if self.retention is None else f"{self.backend} {self.retention:g}"

    @property
    def settings(self) -> dict[str, str]:
        if self.retention is None:
            return {}
        plan = nearest_plan(PLANS, self.retention)
        return {"TANGRAM_PLAN": str(plan), "TANGRAM_RETENTION": str(self.retention)}


@dataclass(slots=True)
class Stream:
    """One streamed request: when each of its tokens arrived."""

    start: float
    prompt_tokens: int = 0
    output_ids: list[int] = field(default_factory=list)
    # (seconds on the clock, tokens so far)
    arrivals: list[tuple[float, int]] = field(default_factory=list)

    @property
    def first(self) -> float:
        return self.arrivals[0][0]

    def tokens_between(self, begin: float, end: float) -> int:
        """Tokens that arrived in (begin, end]."""
        counts = [0, 0]
        for moment, count in self.arrivals:
            for i, limit in enumerate((begin, end)):
                if moment <= limit:
                    counts[i] = count
        return counts[1] - counts[0]


def generate(url: str, prompt: Sequence[int], new_tokens: int) -> Stream:
    body = {
        "input_ids": list(prompt),
        "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
        "stream": True,
    }
    request = urllib.request.Request(
        f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    stream = Stream(start=time.monotonic())
    with opener.open(request, timeout=REQUEST_TIMEOUT_S) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[len(b"data: ") :])
            meta = event["meta_info"]
            stream.arrivals.append((time.monotonic(), meta["completion_tokens"]))
            stream.prompt_tokens = meta["prompt_tokens"]
            stream.output_ids = event["output_ids"]
    if not stream.arrivals or stream.arrivals[-1][1] != new_tokens:
        raise RuntimeError(f"the server sent {stream.arrivals[-1:]}, expected {new_tokens} tokens")
    return stream


def generate_together(url: str, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Stream]:
    streams: list[Stream | None] = [None] * len(prompts)

    def ask(i):
        streams[i] = generate(url, prompts[i], new_tokens)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if None in streams:
        raise RuntimeError("a request of the batch failed; its traceback is above")
    return streams


def measure(url: str, tokens: Sequence[int], run: int, size: argparse.Namespace) -> dict:
    """One run of every metric; returns its figures and the greedy tokens of the long prompt."""
    # the first token tells prompts apart, so nothing is reused between requests or runs
    prompts = [[1000 + 100 * run + i, *tokens] for i in range(1 + size.concurrency)]
    alone = generate(url, prompts[0][: size.prompt_tokens], size.new_tokens)
    batch = generate_together(
        url, [prompt[: size.batch_prompt_tokens] for prompt in prompts[1:]], size.new_tokens
    )
    # from the moment when all are decoding until the first one is done
    begin = max(stream.first for stream in batch)
    end = min(stream.arrivals[-1][0] for stream in batch)
    if begin >= end:
        raise RuntimeError("the batch never decoded together: ask for more --new-tokens")
    return {
        "prefill": alone.prompt_tokens / (alone.first - alone.start),
        "decode": (size.new_tokens - alone.arrivals[0][1]) / (alone.arrivals[-1][0] - alone.first),
        "decode_batch": sum(s.tokens_between(begin, end) for s in batch) / (end - begin),
        "output_ids": alone.output_ids,
    }


def run_variant(variant: Variant, tokens: Sequence[int], size: argparse.Namespace) -> list[dict]:
    with tempfile.TemporaryDirectory(prefix="tangram-bench-") as logs:
        server = Server(
            cpu_arguments(size.model, variant.backend),
            cpu_environment({**variant.settings, "TMPDIR": logs}),
            Path(logs) / "server.log",
        )
        say(f"\n{variant.name}: {variant.settings or ''}\n{server.command_line}")
        with server:
            try:
                server.wait_until_ready()
                # the first request pays for what the server puts off until then
                generate(server.url, tokens[:64], 4)
                runs = []
                for run in range(size.repeats):
                    runs.append(measure(server.url, tokens, run, size))
                    figures = (f"{metric} {runs[-1][metric]:.1f}" for metric in METRICS)
                    say(f"  run {run + 1} of {size.repeats}: {', '.join(figures)}")
                return runs
            except Exception:
                say(f"--- last lines of the server's log\n{server.log_tail()}\n---")
                raise


def table(results: dict[Variant, list[dict]]) -> str:
    """Medians in tokens/s, each with its ratio to torch_native where that was measured."""
    medians = {
        v: {m: statistics.median(r[m] for r in runs) for m in METRICS}
        for v, runs in results.items()
    }
    base = next((medians[v] for v in medians if v.backend == BASELINE), None)
    lines = [f"{'tokens/s, median':18}" + "".join(f"{metric:>22}" for metric in METRICS)]
    for variant, row in medians.items():
        cells = (
            f"{row[m]:12.1f}" + (f" ({row[m] / base[m]:6.2f}x)" if base else " " * 10)
            for m in METRICS
        )
        lines.append(f"{variant.name:18}" + "".join(f"{cell:>22}" for cell in cells))
    return "\n".join([*lines, *(f"{metric}: {meaning}" for metric, meaning in METRICS.items())])


def same_tokens(results: dict[Variant, list[dict]]) -> str | None:
    """Whether uncompressed tangram answered as torch_native did; a fast wrong answer is no result."""
    ours = next((runs for v, runs in results.items() if v.retention == 1.0), None)
    theirs = next((runs for v, runs in results.items() if v.backend == BASELINE), None)
    if not ours or not theirs:
        return None
    pairs = zip(ours, theirs, strict=True)
    equal = all(a["output_ids"] == b["output_ids"] for a, b in pairs)
    return f"greedy tokens at retention 1 equal torch_native's: {'yes' if equal else 'NO'}"


def rows(results: dict[Variant, list[dict]], size: argparse.Namespace) -> list[dict]:
    """A line of the CSV file for each variant and metric."""
    sizes = ("prompt_tokens", "batch_prompt_tokens", "new_tokens", "concurrency")
    common = {**{name: getattr(size, name) for name in sizes}, **machine("bench.cpu_throughput")}
    lines = []
    for variant, runs in results.items():
        for metric in METRICS:
            values = [run[metric] for run in runs]
            low, *_, high = statistics.quantiles(values, n=5) if len(values) > 1 else values * 2
            lines.append(
                {
                    **{"backend": variant.backend, "retention": variant.retention},
                    **{"metric": metric, "unit": "tokens/s"},
                    "median": f"{statistics.median(values):.2f}",
                    **{"p20": f"{low:.2f}", "p80": f"{high:.2f}", "n": len(values)},
                    **common,
                }
            )
    return lines


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "cpu_throughput.csv", help="CSV file (%(default)s)"
    )
    parser.add_argument(
        "--retention",
        type=retention,
        nargs="*",
        default=[1.0, 0.5, 0.25],
        help="retentions of tangram; none measures only torch_native (1.0 0.5 0.25)",
    )
    for name, default, what in (
        ("repeats", 3, "runs of which the median is taken"),
        ("prompt-tokens", 3000, "tokens of the long prompt"),
        ("batch-prompt-tokens", 1024, "tokens of each prompt of the batch"),
        ("new-tokens", 48, "tokens generated by each request"),
        ("concurrency", 8, "requests of the batch"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (%(default)s)")
    return parser.parse_args()


def main() -> int:
    size = arguments()
    from transformers import AutoTokenizer

    document = (resources.files(TEXTS) / DOCUMENT).read_text(encoding="ascii")
    tokens = AutoTokenizer.from_pretrained(size.model)(document).input_ids
    if size.prompt_tokens > len(tokens):
        say(f"error: --prompt-tokens {size.prompt_tokens}: expected at most {len(tokens)}")
        return 2
    if (load := os.getloadavg()[0]) > 0.5:
        say(
            f"warning: other work keeps {load:.1f} processes busy here; these figures will be noisy"
        )
    variants = [Variant(BASELINE), *(Variant("tangram", share) for share in size.retention)]
    results = {variant: run_variant(variant, tokens, size) for variant in variants}
    print(table(results))
    if verdict := same_tokens(results):
        print(verdict)
    append_csv(size.out, rows(results, size))
    say(f"written to {size.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
