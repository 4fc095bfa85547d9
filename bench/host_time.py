"""Host time of a decode step at batch 64: what SGLang's scheduler does around a forward pass.

    python -m bench.host_time [--batch 64] [--backends torch_native tangram] [--repeats 3]
    python -m bench.host_time --gpu --model llama-3.1-8b --backends flashinfer tangram

Runs a real scheduler in a process of its own (`tests/harness`), lets all requests decode together and
times the parts of its loop, step by step; the first prefills and the last steps are left out. Medians
over steps, in milliseconds:

- `host_ms`: choosing the batch, running it and handling its result, without `forward_ms` and waits;
- `forward_ms`: in `forward_batch_generation`. On a CPU that is the model. On a GPU it is the time in
  which the pass is launched, host time as well, and `step_ms`, the sum of both, is what to compare;
- `wait_ms`: on a GPU, waiting for results of the pass before (overlap scheduling is on there).

Prompts differ by a token each, so that in every step some requests begin a page. Steps in which a window
is sealed are among them; with long windows they are few and do not move a median, so `mean_host_ms` is
there too. What the harness itself does in a step is not counted, except
that it takes the tokens of all requests when they end.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench.facts import facts
from bench.record import RESULTS, append_csv, say
from bench.report import medians, rounded
from bench.shapes import NAMES, config_token_bytes, profile_plan, shape_folder

MODULE = "bench.host_time"
# the scheduler's part of a step, beside which nothing is counted
PARTS = ("get_next_batch_to_run", "run_batch", "process_batch_result")
MARGIN = 4  # steps left out at either end of the decoding
NEVER = 10_000  # an interval at which answers are sent


class Clock:
    """Seconds spent in wrapped functions since it was last emptied, by name."""

    def __init__(self):
        self.spent: dict[str, float] = {}

    def wrap(self, owner, function: str, name: str) -> None:
        original = getattr(owner, function)

        def timed(*args, **kwargs):
            started = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - started

        setattr(owner, function, timed)

    def empty(self) -> dict[str, float]:
        found, self.spent = self.spent, {}
        return found


def install(scheduler, hook) -> Clock:
    """Time the scheduler's parts, the forward pass within, waits and the harness's own work."""
    import torch

    clock = Clock()
    for name in PARTS:
        clock.wrap(scheduler, name, "loop")
    clock.wrap(scheduler.model_worker, "forward_batch_generation", "forward")
    clock.wrap(hook, "on_run_batch", "harness")
    if torch.cuda.is_available():
        clock.wrap(torch.cuda.Event, "synchronize", "wait")
    return clock


def watch(batch: int, control) -> None:
    """``on_step``: record what the step before spent, if it decoded the whole batch."""
    if control.step == 0:
        control.data["clock"] = install(
            control.scheduler, control.scheduler.scripted_scheduler_hook
        )
        return
    spent = control.data["clock"].empty()
    last = control.batches[-1] if control.batches else None
    whole = last is not None and last.step == control.step - 1
    if whole and last.mode == "decode" and len(last.rids) == batch:
        control.record(spent)


def figures(records: Sequence[dict[str, float]]) -> dict[str, float]:
    """Medians over steps, in milliseconds."""
    steps = records[MARGIN:-MARGIN]
    if not steps:
        raise RuntimeError(f"{len(records)} steps decoded the whole batch: ask for more tokens")
    forward, wait = ([1e3 * x.get(name, 0.0) for x in steps] for name in ("forward", "wait"))
    host = [
        1e3 * (x["loop"] - x.get("forward", 0.0) - x.get("wait", 0.0) - x.get("harness", 0.0))
        for x in steps
    ]
    return {
        "host_ms": statistics.median(host),
        "mean_host_ms": statistics.mean(host),
        "forward_ms": statistics.median(forward),
        "step_ms": statistics.median(h + f for h, f in zip(host, forward, strict=True)),
        "wait_ms": statistics.median(wait),
        "steps": float(len(steps)),
    }


def measure(backend: str, options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """One scheduler's decode steps."""
    from tests.harness import Req, run_scenario

    length, new = options.input_len, options.output_len
    requests = [
        Req([10 + (i + j) % 200 for j in range(length + i)], new, rid=f"r{i}-")
        for i in range(options.batch)
    ]
    tokens = 2 * options.batch * (length + options.batch + new)
    arguments = {
        "attention_backend": backend,
        "max_running_requests": options.batch,
        "stream_interval": NEVER,
        "max_total_tokens": tokens,
    }
    env = {}
    if options.gpu:
        arguments |= {"load_format": "dummy", "cuda_graph_max_bs_decode": options.batch}
    if backend == "tangram":
        size = config_token_bytes(folder, 2 if options.gpu else 4)
        env = {
            "TANGRAM_RETENTION": f"{options.retention:g}",
            "TANGRAM_POOL_BYTES": str(tokens * size),
        }
        # its own limit is bytes; this one must not come before it
        arguments["max_total_tokens"] = 100 * tokens
        if options.gpu:
            env["TANGRAM_PLAN"] = str(profile_plan(options.model))
    result = run_scenario(
        folder,
        requests,
        server_args=arguments,
        env=env,
        overlap=options.gpu,
        gpu=options.gpu,
        on_step=partial(watch, options.batch),
        timeout_s=600,
    )
    return figures(result.records)


def model_folder(options: argparse.Namespace, scratch: Path) -> Path:
    """A shape on a GPU, else a tiny model whose forward pass is as short as it gets."""
    if options.gpu:
        return shape_folder(options.model)
    from tests.reference.tiny import save, tiny_llama

    return save(tiny_llama(seed=1, layers=options.layers), scratch / "tiny")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--gpu", action="store_true")
    add("--model", choices=NAMES, default="llama-3.1-8b", help="with --gpu (%(default)s)")
    add("--layers", type=int, default=2, help="of the tiny model (%(default)s)")
    add("--backends", nargs="+", help="the first one is compared with; default: stock and ours")
    add("--retention", type=float, default=0.25)
    add("--batch", type=int, default=64)
    add("--input-len", type=int, default=600, help="tokens of the shortest prompt (%(default)s)")
    add("--output-len", type=int, default=220, help="decode steps (%(default)s)")
    add("--repeats", type=int, default=3)
    add("--csv", type=Path, default=RESULTS / "host-time.csv")
    options = parser.parse_args()
    backends = options.backends or ["flashinfer" if options.gpu else "torch_native", "tangram"]
    first, key = None, "step_ms" if options.gpu else "host_ms"
    with tempfile.TemporaryDirectory() as scratch:
        folder = model_folder(options, Path(scratch))
        runs: dict[str, list[dict[str, float]]] = {backend: [] for backend in backends}
        # in turn, so that what else runs on the machine meets all of them
        for repeat in range(options.repeats):
            for backend in backends:
                runs[backend].append(measure(backend, options, folder))
                say(f"{backend} {repeat + 1}: {runs[backend][-1]}")
    for backend, found in runs.items():
        row = medians(found)
        first = first or row[key]
        append_csv(
            options.csv,
            [
                {
                    "model": options.model if options.gpu else f"tiny, {options.layers} layers",
                    "backend": backend,
                    "retention": options.retention if backend == "tangram" else 1.0,
                    **{"batch": options.batch, "input_len": options.input_len},
                    **{"output_len": options.output_len},
                    **{name: rounded(value) for name, value in row.items()},
                    **{"times_first": rounded(row[key] / first), "of": key},
                    **{"runs": len(found), **facts(MODULE)},
                }
            ],
        )
        print(backend, {name: rounded(x) for name, x in row.items()}, f"{row[key] / first:.3f}")


if __name__ == "__main__":
    main()
