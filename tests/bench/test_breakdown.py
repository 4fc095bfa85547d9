"""bench/breakdown: time by class of work, from traces as torch's profiler writes them for CUDA."""

import csv
import gzip
import importlib
import json
import pkgutil
import re
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
from triton.runtime.jit import KernelInterface

import tangram_sglang.kernels
from bench import breakdown, kernel_classes, profiled, trace
from bench.fleet import Pool, ours, stock
from bench.floors import Kept, Load, Model, Rates, floors_ms
from bench.kernel_classes import (
    COMPILED,
    COMPRESSION,
    DECODE_ATTENTION,
    DECODE_GEMM,
    KV_WRITE,
    OTHER,
    PREFILL_ATTENTION,
    PREFILL_GEMM,
    TRITON,
    work_of,
)
from bench.report import Report
from bench.shapes import profile_plan, shape_folder
from bench.subject import Subject
from bench.trace import GRAPH_GAPS, IDLE, NoKernels
from tangram_sglang.plan.described import plan_layout
from tangram_sglang.plan.file import load_plan
from tangram_sglang.settings import Settings

# as they stand in a trace, shortened
GEMM = "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN"
FLASHINFER = (
    "void flashinfer::BatchPrefillWithPagedKVCacheKernel<flashinfer::KernelTraits<(flashinfer::"
    "MaskMode)1, 128u, 2u, 8u>, flashinfer::BatchPrefillPagedParams>(flashinfer::Params)"
)
FLASHINFER_HOPPER = (
    "void flashinfer::PrefillWithKVCacheKernel<flashinfer::CollectiveMainloop<cutlass::bfloat16_t>>"
)
NORM = "void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>(__nv_bfloat16*)"


def launched() -> list[tuple[str, str]]:
    """(module, name in a trace) of every kernel of ours; what is called in kernels has other names."""
    modules = [
        importlib.import_module(f"tangram_sglang.kernels.{x.name}")
        for x in pkgutil.iter_modules(tangram_sglang.kernels.__path__)
    ]
    return [
        (module.__name__, value.fn.__name__)
        for module in modules
        for value in vars(module).values()
        if isinstance(value, KernelInterface)
        and value.fn.__module__ == module.__name__
        and value.fn.__name__.endswith("kernel")
    ]


def test_every_kernel_of_ours_has_a_name_of_its_own_and_a_class():
    found = [name for _, name in launched()]
    assert len(found) == len(set(found)) > 15
    assert [name for name in found if work_of(name) is None] == []
    # a launch is written NAME[grid](...): a kernel with another kind of name would be overlooked
    folder = Path(tangram_sglang.kernels.__path__[0])
    text = "\n".join(path.read_text() for path in folder.glob("*.py"))
    assert set(re.findall(r"^\s+(\w+)\[\(?[^\]]*\]\($", text, re.MULTILINE)) <= set(found)


def test_no_name_of_the_table_is_one_that_nobody_launches():
    listed = [x.names for x in TRITON[: [x.names for x in TRITON].index("_fwd_kernel")]]
    assert sorted(listed) == sorted(name for _, name in launched())
    assert len({x.names for x in TRITON}) == len(TRITON)


@pytest.mark.parametrize(
    "name, outside, inside",
    [
        ("prefill_hopper_kernel", PREFILL_ATTENTION, PREFILL_ATTENTION),
        ("merge_kernel", DECODE_ATTENTION, DECODE_ATTENTION),
        ("prefill_merge_kernel", PREFILL_ATTENTION, PREFILL_ATTENTION),
        ("keydiff_kernel", COMPRESSION, COMPRESSION),
        ("_fwd_grouped_kernel_stage1", DECODE_ATTENTION, DECODE_ATTENTION),
        (FLASHINFER, PREFILL_ATTENTION, DECODE_ATTENTION),
        # CUTLASS in its arguments makes it no matrix product
        (FLASHINFER_HOPPER, PREFILL_ATTENTION, DECODE_ATTENTION),
        (GEMM, PREFILL_GEMM, DECODE_GEMM),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>", PREFILL_GEMM, DECODE_GEMM),
        ("void gemv2T_kernel_val<int, __nv_bfloat16>", PREFILL_GEMM, DECODE_GEMM),
        ("void store_kvcache_kernel<1024l>(StoreKVCacheParams)", KV_WRITE, KV_WRITE),
        (NORM, None, None),
        # a part of a name of ours is none of ours
        ("my_merge_kernel", None, None),
    ],
)
def test_classes(name, outside, inside):
    found = work_of(name)
    assert (found if isinstance(found, tuple) else (found, found)) == (outside, inside)


def gpu(name, ts, dur, correlation, cat="kernel", stream=7, graph=0) -> dict:
    args = {"device": 0, "stream": stream, "correlation": correlation, "graph id": graph}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


def launch(name, correlation, cat="cuda_runtime") -> dict:
    args = {"External id": 3, "cbid": 311, "correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "ts": 1.0, "dur": 900.0, "args": args}


EVENTS = [
    # what is no work of the GPU
    {"ph": "M", "name": "process_name", "ts": 0, "pid": 1, "args": {"name": "python"}},
    {"ph": "X", "cat": "gpu_user_annotation", "name": "step", "ts": 0, "dur": 9e9, "args": {}},
    {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 1, "ts": 2, "pid": 0},
    *(launch("cudaLaunchKernel", 1), launch("cudaGraphLaunch", 50)),
    launch("cuGraphLaunch", 60, "cuda_driver"),
    # a graph of decode, out of order; 500 us of gap between its kernels
    gpu("decode_kernel", 12_000, 2000, 50),
    gpu(GEMM, 10_000, 1500, 50),
    # prefill: back to back, an overlap of 500 us and a copy that hides behind a kernel
    gpu(GEMM, 1000, 3000, 1),
    gpu("prefill_kernel", 4000, 2000, 2),
    gpu("keydiff_kernel", 5500, 1500, 3, stream=9),
    gpu("Memcpy HtoD (Pageable -> Device)", 6200, 300, 4, "gpu_memcpy", stream=11),
    # the next graph, 1 ms after the last one, of which the trace has the launch or the graph's id
    gpu(FLASHINFER, 15_000, 1000, 60),
    gpu(FLASHINFER, 16_000, 1000, 70, graph=5),
    gpu(NORM, 17_000, 500, 71),
    gpu("Memset (Device)", 17_500, 250, 72, "gpu_memset"),
]


def test_time_adds_up_and_overlaps_count_once():
    found = trace.breakdown([trace.Event(**plain(event)) for event in EVENTS])
    expected = {
        PREFILL_GEMM: 3.0,
        PREFILL_ATTENTION: 2.0,
        COMPRESSION: 1.0,
        KV_WRITE: 0,
        DECODE_GEMM: 1.5,
        DECODE_ATTENTION: 2 + 1 + 1,
        OTHER: 0.5 + 0.25,
        GRAPH_GAPS: 0.5,
        IDLE: 3.0 + 1.0,
    }
    assert found.ms == pytest.approx(expected)
    assert found.span_ms == pytest.approx(16.75) == pytest.approx(sum(expected.values()))
    assert found.graphs == 3
    assert found.launches[DECODE_ATTENTION] == 3
    assert found.launches[OTHER] == 3
    assert found.largest(OTHER, 1) == {NORM: 0.5}
    assert not found.misplaced


def plain(event: dict) -> dict:
    """Fields of `trace.Event` from those of the file."""
    args = event.get("args", {})
    kept = {key: event[key] for key in ("ph", "cat", "name", "ts", "dur") if key in event}
    return {**kept, "args": trace.Args(args.get("correlation", 0), args.get("graph id", 0))}


def write(folder: Path, events: list[dict]) -> Path:
    """A file as torch's profiler writes it, where SGLang's client has it put."""
    path = folder / "1700000000.1" / "1700000000.2-TP-0.trace.json.gz"
    path.parent.mkdir(parents=True)
    text = json.dumps({"schemaVersion": 1, "deviceProperties": [{}], "traceEvents": events})
    path.write_bytes(gzip.compress(text.encode()))
    return path


def test_files_say_the_same(tmp_path):
    path = write(tmp_path, EVENTS)
    assert profiled.trace_file(tmp_path) == path
    direct = trace.breakdown([trace.Event(**plain(event)) for event in EVENTS])
    assert trace.breakdown(trace.read(path)) == direct


def test_kernels_of_prefill_in_a_graph_are_pointed_out():
    events = [launch("cudaGraphLaunch", 5), gpu("prefill_kernel", 1, 1, 5)]
    events += [gpu("decode_kernel", 3, 1, 6)]
    found = trace.breakdown([trace.Event(**plain(event)) for event in events])
    assert found.misplaced == {"prefill_kernel": 1, "decode_kernel": 1}
    assert found.ms[PREFILL_ATTENTION] == found.ms[DECODE_ATTENTION] == 0.001


def test_a_trace_of_a_cpu_and_a_missing_one_are_refused(tmp_path):
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 1, "args": {"a": "x"}}
    path = write(tmp_path / "cpu", [event, event])
    with pytest.raises(NoKernels, match=r"no GPU kernel in the file \(events: 2 cpu_op\)"):
        trace.breakdown(trace.read(path), "the file")
    with pytest.raises(RuntimeError, match=r"0 traces in .*, expected that of one GPU"):
        profiled.trace_file(tmp_path / "other")


POOL = Pool(1000, 131_072)


def llama() -> tuple[Model, dict]:
    config = json.loads((shape_folder("llama-3.1-8b") / "config.json").read_text())
    return Model.of(config, 2), config


def test_floors_of_a_prompt_and_its_answer():
    model, config = llama()
    # 8.03 billion weights, of which 0.53 billion are embeddings that no product reads
    assert model.layers_size + 2 * model.head_size == pytest.approx(8.03e9, rel=1e-3)
    load, rates = Load([1000, 600], [0, 100], [3, 1]), Rates(1e12, 1e9)
    found = floors_ms(load, 2, model, Kept(model.heads), rates)
    assert found[PREFILL_GEMM] == pytest.approx(2 * model.layers_size * 1500 / 1e9)
    assert found[DECODE_GEMM] == pytest.approx(2 * (model.layers_size + model.head_size) * 2 / 1e6)
    seen = sum(range(1, 1001)) + sum(range(101, 601))
    width = config["num_attention_heads"] * config["head_dim"] * config["num_hidden_layers"]
    assert found[PREFILL_ATTENTION] == pytest.approx(4 * width * seen / 1e9)
    assert found[DECODE_ATTENTION] == pytest.approx(131_072 * (1001 + 1002) / 1e6)
    assert set(floors_ms(load, 2, model, None, rates)) == {PREFILL_GEMM, DECODE_GEMM}


def test_what_a_server_holds_is_what_the_layout_says():
    model, _ = llama()
    plan = profile_plan("llama-3.1-8b")
    entry = ours(0.25, plan, POOL)
    kept = Kept.of(entry, model, 9000)
    layout = plan_layout(load_plan(plan), Settings.from_env(entry.settings), 9000)
    lengths = np.array([1, 768, 769, 770, 4000, 8999])
    assert kept.entries(lengths).tolist() == [layout.total_entries(int(n)) for n in lengths]
    assert kept.entries(np.array([8192])) < 0.35 * 8192 * model.heads
    for whole in (stock("flashinfer", POOL), ours(1.0, plan, POOL)):
        assert Kept.of(whole, model, 9000).entries(lengths).tolist() == (lengths * 256).tolist()
    assert Kept.of(ours(0.25, None, POOL), model, 9000) is None


class FakeBench:
    """As much of `bench.experiment.Bench` as a load takes; the client's profile is ``EVENTS``."""

    def __init__(self, folder: Path, **options):
        self.options = Namespace(
            cpu=False, traces=folder / "traces", requests=None, tflops=790.0, terabytes=4.27,
            context_length=9000, csv=folder / "x.csv", **options,
        )  # fmt: skip
        shape = shape_folder("llama-3.1-8b")
        self.subject = Subject("llama", shape, 131_072, (), {}, None, True)
        self.report = Report(self.options.csv, {"model": "llama"}, {"gpu": "none"})
        self.scratch = folder
        self.flags: list[str] = []

    def length(self, tokens: float) -> int:
        return round(tokens)

    def load(self, server, flags, seed) -> dict:
        self.flags = flags
        write(Path(flags[flags.index("--profile-output-dir") + 1]), EVENTS)
        return {"input_lens": [900], "cached_tokens": [0], "output_lens": [100]}

    def runs(self, measure) -> list:
        return [measure(1)]


def test_a_profiled_load_becomes_rows_and_a_table(tmp_path, capsys):
    now = FakeBench(tmp_path, cases=["long"])
    for entry in (stock("flashinfer", POOL), ours(0.25, profile_plan("llama-3.1-8b"), POOL)):
        breakdown.on_server(now, entry, None)
    assert now.flags[now.flags.index("--profile-activities") + 1] == "GPU"
    assert now.flags[now.flags.index("--random-input-len") + 1] == "122880"
    with now.options.csv.open(newline="") as file:
        rows = {(row["server"], row["class"]): row for row in csv.DictReader(file)}
    assert len(rows) == 2 * len(trace.ROWS)
    row = rows["tangram 0.25", DECODE_ATTENTION]
    assert (row["ms"], row["decode_steps"], row["span_ms"]) == ("4.0", "3.0", "16.75")
    assert float(row["share"]) == pytest.approx(4 / 16.75, rel=1e-4)
    assert float(row["tokens_per_s"]) == pytest.approx(1000 / 0.01675, rel=1e-4)
    # 99 steps at 901 to 999 entries of 131,072 bytes; one window of 512 is sealed from 769 on
    whole = float(rows["flashinfer", DECODE_ATTENTION]["floor_ms"])
    assert whole == pytest.approx(99 * 950 * 131_072 / 4.27e9, rel=1e-3)
    assert 0 < float(row["floor_ms"]) < whole
    assert rows["flashinfer", IDLE]["floor_ms"] == ""
    with (tmp_path / "x-kernels.csv").open(newline="") as file:
        kernels = {(row["class"], row["kernel"]): row for row in csv.DictReader(file)}
    assert kernels[COMPRESSION, "keydiff_kernel"]["ms"] == "1.0"
    # versions and command are those of the first file: a suite is another command
    assert list(kernels[COMPRESSION, "keydiff_kernel"])[-2:] == ["ms", "gpu"]
    assert kernels[COMPRESSION, "keydiff_kernel"]["gpu"] == "none"
    assert NORM[:40] in capsys.readouterr().err
    shown = breakdown.table(now.report).splitlines()
    assert shown[0].split() == ["long", "flashinfer", "tangram", "0.25"]
    assert [line[:25].strip() for line in shown[2:11]] == list(trace.ROWS)
    assert shown[10].split() == [*IDLE.split(), *["4.0", "23.9%"] * 2]


def test_names_of_templates_stay_readable():
    assert breakdown.brief("keydiff_kernel") == "keydiff_kernel"
    long = "void a::Kernel<\n  cute::tuple<1>,\r\n" + "cute::C<64>, " * 90 + ">(Params)"
    found = breakdown.brief(long)
    assert (
        found.startswith("void a::Kernel< cute::tuple<1>, cute::C<64>, cute") and len(found) == 100
    )


def test_loads_are_those_of_the_experiments(tmp_path):
    now = FakeBench(tmp_path)
    for name, flag, value in (
        ("short", "--num-prompts", "24"),
        ("multi_turn", "--gsp-num-turns", "5"),
        ("shared_document", "--gsp-system-prompt-len", "65536"),
    ):
        flags = breakdown.LOADS[name](now)
        assert flags[flags.index(flag) + 1] == value


def test_the_table_of_names_is_well_formed():
    for kernels in (*TRITON, *COMPILED):
        work = kernels.work if isinstance(kernels.work, tuple) else (kernels.work,)
        assert set(work) <= set(kernel_classes.CLASSES)
        assert kernels.why
