"""`tangram inspect`: what a plan file says and what a server would hold with it, in the terminal."""

import argparse
from pathlib import Path

from tangram_sglang.calib.profiles import ERROR
from tangram_sglang.cli.retention import retention
from tangram_sglang.errors import TangramError
from tangram_sglang.plan.described import plan_layout
from tangram_sglang.plan.file import PlanFile, load_plan
from tangram_sglang.plan.layout import KVLayout
from tangram_sglang.settings import GROUPINGS, Settings

EIGHTHS = " ▏▎▍▌▋▊▉█"
BAR = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_layout_arguments(parser)
    parser.add_argument(
        "--tokens", type=int, default=8192, help="length to count bytes at (%(default)s)"
    )
    parser.add_argument(
        "--itemsize", type=int, default=2, help="bytes of a number, 2 for bf16 (%(default)s)"
    )


def add_layout_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments from which ``layout_of`` builds a layout."""
    parser.add_argument("plan", type=Path, metavar="PLAN", help="plan file")
    parser.add_argument("--retention", type=retention, help="share kept (the plan's)")
    parser.add_argument("--group-heads", type=int, default=4, help="H_p (%(default)s)")
    parser.add_argument("--grouping", choices=GROUPINGS, default="global", help="(%(default)s)")


def layout_of(arguments: argparse.Namespace, max_tokens: int) -> tuple[PlanFile, KVLayout]:
    """The plan file and the layout that a server would make of it."""
    plan = load_plan(arguments.plan)
    settings = Settings(
        retention=arguments.retention,
        group_heads=arguments.group_heads,
        grouping=arguments.grouping,
    )
    return plan, plan_layout(plan, settings, max_tokens)


def run(arguments: argparse.Namespace) -> int:
    for name in ("tokens", "itemsize"):
        if getattr(arguments, name) < 1:
            raise TangramError(f"--{name} {getattr(arguments, name)}: expected at least 1")
    plan, layout = layout_of(arguments, arguments.tokens)
    sections = (
        _facts(plan, layout),
        _bars(plan, layout),
        _groups(plan, layout),
        _bytes(layout, arguments.tokens, arguments.itemsize),
    )
    print("\n\n".join(sections))
    return 0


def _facts(plan: PlanFile, layout: KVLayout) -> str:
    made, picked = plan.calibration, plan.selection
    files = (picked.scorer, picked.stats_file, picked.gates_file)
    mean = sum(plan.budgets) / len(plan.budgets)
    # alpha has no part in budgets that minimise an error
    alpha = f", alpha {made.alpha:g}" if made.scorers != [ERROR] else ""
    lines = {
        "model": plan.model.id,
        "budgets from": f"{' + '.join(made.scorers)}, scope {made.scope}{alpha}",
        "calibrated": f"retention {made.retention:g}, {made.samples} windows of {made.window} tokens, "
        f"corpus {made.corpus_hash[:12]}, tangram_sglang {plan.tool_version}",
        "picked by": ", ".join(name for name in files if name),
        "mean budget": f"{mean:.4f} as calibrated, {layout.retention_held:.4f} of the bytes held",
    }
    return "\n".join(f"{name:14}{value}" for name, value in lines.items())


def _bars(plan: PlanFile, layout: KVLayout) -> str:
    """One line a layer: each head's budget as a bar, and K of its group."""
    heads = len(plan.budgets) // len(plan.layers)
    lines = ["budget of each KV head, and tokens it keeps of a window"]
    for i, layer in enumerate(plan.layers):
        cells = []
        for head in range(heads):
            kept = layout.groups[layout.place[layer, head][0]].kept
            cells.append(f"{bar(plan.budgets[i * heads + head])} {kept:4}")
        # wide models take several lines a layer
        for first in range(0, heads, 4):
            name = f"layer {layer:3} " if first == 0 else " " * 10
            lines.append(f"{name} {'  '.join(cells[first : first + 4])}")
    return "\n".join(lines)


def bar(share: float, width: int = BAR) -> str:
    """A bar of ``width`` characters, full at 1."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    text = EIGHTHS[8] * (eighths // 8) + (EIGHTHS[eighths % 8] if eighths % 8 else "")
    return f"|{text:{width}}|"


def _groups(plan: PlanFile, layout: KVLayout) -> str:
    budgets = dict(zip(_heads(plan), plan.budgets, strict=True))
    heads = len(layout.groups) - layout.score_groups
    lines = [f"{heads} groups of {layout.per_group} heads (layer.head)"]
    for g, group in enumerate(layout.groups[:heads]):
        own = [budgets[head] for head in group.heads]
        names = " ".join(f"{layer}.{head}" for layer, head in group.heads)
        lines.append(
            f"  group {g:3}  K {group.kept:4}  budgets {max(own):.3f} .. {min(own):.3f}  {names}"
        )
    if layout.score_groups:
        lines.append(
            f"and raw pages as for {layout.score_groups} more, for the gate scores of raw tokens"
        )
    return "\n".join(lines)


def _heads(plan: PlanFile) -> list[tuple[int, int]]:
    count = len(plan.budgets) // len(plan.layers)
    return [(layer, head) for layer in plan.layers for head in range(count)]


def _bytes(layout: KVLayout, tokens: int, itemsize: int) -> str:
    pages = layout.pages(tokens)
    held = pages * layout.page_bytes(itemsize)
    full = layout.full_bytes(tokens, itemsize)
    return "\n".join(
        [
            f"a request of {tokens} tokens, {itemsize} bytes a number, full-attention layers",
            f"  held          {held:14,} bytes, {held / tokens:12,.1f} a token, {pages} pages",
            f"  uncompressed  {full:14,} bytes, {full / tokens:12,.1f} a token",
            f"  share         {held / full:14.4f}",
            f"  sealed        {layout.rule.sealed(tokens)} windows of {layout.rule.window}, "
            f"{layout.rule.recent} recent tokens at least are raw",
        ]
    )
