"""`tangram plan`: the split map of a plan, how many programs of the decode kernel each head gets."""

import argparse

import numpy as np

from tangram_sglang.cli.inspect import add_layout_arguments, layout_of
from tangram_sglang.errors import TangramError
from tangram_sglang.plan.described import plan_shape
from tangram_sglang.plan.file import PlanFile
from tangram_sglang.plan.layout import KVLayout
from tangram_sglang.plan.split_map import equal_splits, plan_splits

MAX_TOKENS = 8192


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_layout_arguments(parser)
    parser.add_argument(
        "--gpu", action="store_true", help="measure how many programs this machine's GPU holds"
    )
    parser.add_argument(
        "--programs", type=int, metavar="N", help="N_CTA, programs that a GPU holds at once"
    )
    parser.add_argument(
        "--batch",
        type=lambda text: tuple(int(x) for x in text.split(",")),
        default=(1,),
        metavar="N[,N...]",
        help="requests in flight (1)",
    )


def run(arguments: argparse.Namespace) -> int:
    if any(batch < 1 for batch in arguments.batch):
        raise TangramError(f"--batch {arguments.batch}: expected whole numbers of at least 1")
    plan, layout = layout_of(arguments, MAX_TOKENS)
    programs = _programs(arguments, plan, layout)
    shares = head_shares(plan, layout)
    print(f"{plan.model.id}: N_CTA {programs} programs, retention held {layout.retention_held:.4f}")
    for batch in arguments.batch:
        print(f"\nbatch {batch}\n{describe(plan.layers, shares, programs, batch)}")
    return 0


def head_shares(plan: PlanFile, layout: KVLayout) -> np.ndarray:
    """Tokens that each head keeps of a window, [L, H]."""
    heads = len(plan.budgets) // len(plan.layers)
    kept = [
        layout.groups[layout.place[layer, head][0]].kept
        for layer in plan.layers
        for head in range(heads)
    ]
    return np.array(kept).reshape(len(plan.layers), heads)


def describe(layers: list[int], shares: np.ndarray, programs: int, batch: int) -> str:
    """The split map, and how evenly it and a map of equal splits share out the work."""
    ours = plan_splits(shares, programs, batch)
    equal = equal_splits(shares.shape, programs, batch)
    lines = ["            splits by head, of all requests, busiest program to the mean"]
    for i, layer in enumerate(layers):
        splits = " ".join(f"{s:4}" for s in ours.splits[i])
        lines.append(
            f"  layer {layer:3} {splits}  all {ours.grid[i]:6}  "
            f"{imbalance(shares[i], ours.splits[i]):5.2f} "
            f"(equal splits {imbalance(shares[i], equal.splits[i]):.2f})"
        )
    worst = [
        max(imbalance(s, x) for s, x in zip(shares, m.splits, strict=True)) for m in (ours, equal)
    ]
    mean = [
        np.mean([imbalance(s, x) for s, x in zip(shares, m.splits, strict=True)])
        for m in (ours, equal)
    ]
    lines.append(
        f"  busiest program to the mean: {mean[0]:.2f} on average, {worst[0]:.2f} at worst; with equal "
        f"splits {mean[1]:.2f} and {worst[1]:.2f}\n"
        f"  so rounded it is the paper's map; when serving, {programs} programs a launch take equal parts "
        "of all work, in these proportions"
    )
    return "\n".join(lines)


def imbalance(shares: np.ndarray, splits: np.ndarray) -> float:
    """Work of the busiest program of a layer over the mean of its programs."""
    work = shares / splits
    return float(work.max() / (shares.sum() / splits.sum()))


def _programs(arguments: argparse.Namespace, plan: PlanFile, layout: KVLayout) -> int:
    if arguments.programs is not None:
        if arguments.gpu or arguments.programs < 1:
            raise TangramError(
                f"--programs {arguments.programs}: expected at least 1, and not together with --gpu"
            )
        return arguments.programs
    if not arguments.gpu:
        raise TangramError(
            "how many programs run at once decides the map: give --gpu to measure it on this "
            "machine, or --programs N"
        )
    import torch

    if not torch.cuda.is_available():
        raise TangramError(
            "--gpu: this machine has no CUDA device; run it where the model is served, or give "
            "--programs N as that machine's start measured it"
        )
    from tangram_sglang.kernels.layer_tables import LayerTables
    from tangram_sglang.kernels.occupancy import resident_programs

    shape = plan_shape(plan).layers[0]
    pages = (2, layout.per_group, 2, layout.rule.page, shape.head_dim)
    pool = torch.empty(pages, dtype=torch.bfloat16, device="cuda")
    tables = LayerTables.build(layout, pool.device)
    return resident_programs(tables, pool, shape.q_heads // shape.kv_heads)
