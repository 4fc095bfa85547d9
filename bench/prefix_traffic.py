"""Same bytes, same traffic: prefix hits of stock SGLang and of `tangram` when the pool is too small.

    python -m bench.prefix_traffic [--conversations 12] [--turns 4] [--retention 1.0 0.3] ...

Conversations take turns, each turn's prompt being all that was said before and some more. Together
they end up three times (`--times`) as long as the pool is uncompressed, so a server must forget. Stock
SGLang (torch_native, radix cache on) gets that many tokens, and tangram the same number of bytes.
Hits are the cached tokens that the server reports. Prompts are random tokens and answers have a fixed
length: only the counts matter. (SGLang's own multi-turn cache test asserts that everything hits.)

The table is printed only if tangram at retention 1.0 gave the same greedy answers as stock SGLang; one
conversation may differ, since two tokens can stand within rounding of each other.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from bench import gauge
from bench.record import RESULTS, append_csv, machine, say
from bench.server_api import get, post
from bench.smollm2 import MODEL_DIR
from bench.traffic import Answer, Sizes, Traffic, first_difference, play, totals, traffic
from tangram_sglang.cli.demo import PLANS, nearest_plan
from tangram_sglang.cli.retention import retention
from tangram_sglang.cli.server import Server, cpu_arguments, cpu_environment

STOCK = "torch_native"
FLOAT32 = 4
COLUMNS = {
    "system": 14,
    "retention": 11,
    "pool_bytes": 13,
    "requests": 10,
    "prompt_tokens": 15,
    "cached_tokens": 15,
    "hit_rate": 10,
    "prefilled_tokens": 18,
    "retractions": 13,
    "seconds": 9,
}


@dataclass(frozen=True, slots=True)
class System:
    """What is measured: a backend and, for tangram, its retention."""

    backend: str
    retention: float | None = None

    def server(self, size: argparse.Namespace, sizes: Sizes, folder: Path) -> Server:
        flags = cpu_arguments(size.model, self.backend)
        tokens, settings = str(sizes.pool_tokens), {"TMPDIR": str(folder)}
        if self.retention is not None:
            # its own limit is bytes; this one must not come before it
            tokens = str(100 * sizes.pool_tokens)
            settings["TANGRAM_RETENTION"] = f"{self.retention:g}"
            settings["TANGRAM_POOL_BYTES"] = str(pool_bytes(size.model, sizes))
            if size.plan != "none":
                plan = nearest_plan(PLANS, self.retention) if size.plan is None else size.plan
                settings["TANGRAM_PLAN"] = str(plan)
        flags[flags.index("--max-total-tokens") + 1] = tokens
        flags += ["--max-running-requests", str(size.concurrency)]
        return Server(flags, cpu_environment(settings), folder / "server.log")


def pool_bytes(model: Path, sizes: Sizes) -> int:
    """Bytes of the uncompressed pool in float32."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    per_token = config.num_hidden_layers * config.num_key_value_heads * 2 * head_dim * FLOAT32
    return sizes.pool_tokens * per_token


def run(system: System, asked: Traffic, sizes: Sizes, size: argparse.Namespace):
    """Answers by conversation and turn, and the row of the table."""
    with tempfile.TemporaryDirectory(prefix="tangram-bench-") as folder:
        server = system.server(size, sizes, Path(folder))
        say(f"\n{system.backend} {system.retention or ''}\n{server.command_line}")
        with server:
            try:
                server.wait_until_ready()
                # the first request pays for what the server puts off until then
                asyncio.run(_client(server.url, 2)(list(asked.prompts[0][0][:16])))
                get(f"{server.url}/flush_cache")
                started = time.monotonic()
                answers = asyncio.run(
                    play(asked, _client(server.url, sizes.answer), size.concurrency)
                )
                seconds = time.monotonic() - started
                page = get(f"{server.url}/metrics")
                retractions = int(gauge.read(page, "sglang:num_retracted_requests_total"))
            except Exception:
                say(f"--- last lines of the server's log\n{server.log_tail()}\n---")
                raise
    row = {
        "system": system.backend,
        "retention": "" if system.retention is None else f"{system.retention:g}",
        "pool_bytes": pool_bytes(size.model, sizes),
        **totals(answers),
        "retractions": retractions,
        "seconds": round(seconds, 1),
    }
    if row["prompt_tokens"] != sizes.prompt_tokens:
        raise RuntimeError(f"{row['prompt_tokens']} prompt tokens, expected {sizes.prompt_tokens}")
    return answers, row


def _client(url: str, new_tokens: int):
    """Sends one request at a call."""

    async def ask(prompt: list[int]) -> Answer:
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling}
        got = await asyncio.to_thread(post, f"{url}/generate", body)
        if len(got["output_ids"]) != new_tokens:
            raise RuntimeError(f"a prompt of {len(prompt)} tokens got {got['meta_info']}")
        meta = got["meta_info"]
        return Answer(meta["prompt_tokens"], meta["cached_tokens"], tuple(got["output_ids"]))

    return ask


def verdict(ours: list[list[Answer]], theirs: list[list[Answer]]) -> tuple[bool, str]:
    """Whether the answers of two systems are the same, and how to say it."""
    differing = [k for k in first_difference(ours, theirs) if k is not None]
    text = f"{len(ours) - len(differing)} of {len(ours)} conversations have the same greedy answers"
    return len(differing) <= 1, text


def table(rows: list[dict]) -> str:
    lines = ["".join(f"{name:>{width}}" for name, width in COLUMNS.items())]
    for row in rows:
        cells = {**row, "hit_rate": f"{row['hit_rate']:.3f}"}
        lines.append("".join(f"{cells[name]!s:>{width}}" for name, width in COLUMNS.items()))
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--plan", help="plan file, or none; default: the nearest shipped one")
    parser.add_argument("--retention", type=retention, nargs="*", default=[1.0, 0.3])
    parser.add_argument("--order", choices=("random", "rounds"), default="random")
    parser.add_argument("--times", type=float, default=3.0, help="(%(default)s)")
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "prefix_traffic.csv", help="CSV file (%(default)s)"
    )
    for name, default, what in (
        ("conversations", 12, "conversations"),
        ("turns", 4, "turns of each"),
        ("first-tokens", 1500, "tokens of a first prompt"),
        ("more-tokens", 200, "tokens that a later turn adds"),
        ("answer-tokens", 16, "tokens of each answer"),
        ("concurrency", 2, "requests at once"),
        ("seed", 1, "of tokens and order"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (%(default)s)")
    return parser.parse_args()


def main() -> int:
    size = arguments()
    from transformers import AutoTokenizer

    lengths = (size.first_tokens, size.more_tokens, size.answer_tokens)
    try:
        sizes = Sizes(size.conversations, size.turns, *lengths, size.times)
    except ValueError as error:
        say(f"error: {error}")
        return 2
    tokenizer = AutoTokenizer.from_pretrained(size.model)
    words = sorted(set(range(len(tokenizer))) - set(tokenizer.all_special_ids))
    asked = traffic(sizes, words, size.order, size.seed)
    heading = (
        f"{sizes.conversations} conversations of {sizes.length} tokens, {sizes.times:g} times the "
        f"uncompressed pool of {sizes.pool_tokens} tokens; {size.order} order"
    )
    say(heading)
    systems = [System(STOCK), *(System("tangram", share) for share in size.retention)]
    answers, rows = {}, []
    for system in systems:
        answers[system], row = run(system, asked, sizes, size)
        rows.append(row)
        say(table([row]))
    whole = System("tangram", 1.0)
    if whole in answers:
        same, text = verdict(answers[whole], answers[systems[0]])
        if not same:
            say(f"error: tangram at retention 1.0 and {STOCK}: only {text}")
            return 1
        heading += f"\ntangram at retention 1.0 and {STOCK}: {text}"
    print(f"{heading}\n{table(rows)}")
    common = {
        "model": size.model.name,
        **asdict(sizes),
        "order": size.order,
        "concurrency": size.concurrency,
    }
    common |= {"seed": size.seed, **machine("bench.prefix_traffic")}
    append_csv(size.out, [{**row, "hit_rate": f"{row['hit_rate']:.4f}", **common} for row in rows])
    say(f"written to {size.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
