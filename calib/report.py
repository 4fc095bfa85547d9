"""The report of a calibration: CSV files, PNG plots and one HTML page in a folder."""

import csv
import html
import sys
from collections.abc import Sequence
from pathlib import Path

from tangram_sglang.calib.calibrate import Recipe
from tangram_sglang.calib.profiles import queries_of, samples
from tangram_sglang.calib.report_stability import halves_table, kinds_table, samples_table
from tangram_sglang.calib.report_tables import (
    Case,
    Table,
    clipping_table,
    grouping_table,
    heat_table,
    memory_table,
    regularity_table,
)
from tangram_sglang.calib.run_folder import Run, RunFolder
from tangram_sglang.plan.window import WindowRule
from tangram_sglang.settings import Settings

# longer tables are cut on the page; the CSV has all of it
ROWS = 60

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Calibration of {model}</title>
<style>
body {{ font: 15px/1.5 sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em }}
img {{ max-width: 100% }}
table {{ border-collapse: collapse; font-size: 13px }}
td, th {{ border: 1px solid #ccc; padding: 2px 8px; text-align: right }}
</style>
<h1>Calibration of {model}</h1>
<p>{facts}</p>
{sections}
</html>
"""


def write_report(folder: RunFolder, recipe: Recipe, out: Path) -> Path:
    """Write the report of a finished run; returns the page."""
    out.mkdir(parents=True, exist_ok=True)
    tables = report_tables(folder, recipe)
    drawn = _draw(tables, out)
    sections = []
    for table in tables:
        _write_csv(table, out / f"{table.name}.csv")
        sections.append(_section(table, table.name in drawn))
    page = out / "index.html"
    page.write_text(
        PAGE.format(
            model=html.escape(folder.run.model),
            facts=html.escape(_facts(folder.run, recipe)),
            sections="\n".join(sections),
        ),
        encoding="utf-8",
    )
    return page


def report_tables(folder: RunFolder, recipe: Recipe) -> list[Table]:
    """Every table of the report."""
    run, settings = folder.run, Settings()
    layers = queries_of(folder).shape.layers
    heads = tuple((x.layer_id, h) for x in layers for h in range(x.kv_heads))
    rule = WindowRule(run.window, run.recent, settings.page, run.sinks)
    cases = [
        Case(
            retention,
            recipe.alpha,
            heads,
            rule,
            tuple(samples(folder, name, recipe.scope, retention) for name in run.profiles),
        )
        for retention in recipe.retentions
    ]
    heat = heat_table(cases)
    spread = Table("spread", "Spread of the heads' shares", "The same figures by size.", heat.rows)
    tables = [
        heat,
        regularity_table(cases),
        spread,
        clipping_table(cases),
        memory_table(cases, settings.group_heads, settings.page),
        grouping_table(cases),
        halves_table(cases),
        kinds_table(cases),
        samples_table(cases),
    ]
    # one text has no halves, ten windows no draw of fewer
    return [table for table in tables if table.rows]


def _draw(tables: Sequence[Table], out: Path) -> set[str]:
    """Names of the tables that were drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print(
            "the report has no plots: matplotlib is not installed; "
            "pip install 'tangram-sglang[report]' and repeat the command, which measures nothing again",
            file=sys.stderr,
        )
        return set()
    from tangram_sglang.calib.report_plots import draw

    return {table.name for table in tables if draw(table, out)}


def _facts(run: Run, recipe: Recipe) -> str:
    picked = run.selection
    if recipe.selection not in (None, picked):
        picked = f"{recipe.selection}, errors were measured with {picked}"
    return (
        f"Profiles {', '.join(run.profiles)}; scope {recipe.scope}; alpha {recipe.alpha:g}; window "
        f"{run.window}; {len(run.tokens)} texts of {len({kind for kind, _ in run.texts})} kinds, "
        f"{sum(run.tokens)} tokens, corpus {run.corpus_hash[:12]}; tokens are picked by "
        f"{picked}."
    )


def _write_csv(table: Table, path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        if table.rows:
            writer = csv.DictWriter(file, list(table.rows[0]))
            writer.writeheader()
            writer.writerows({k: _text(x) for k, x in row.items()} for row in table.rows)


def _section(table: Table, drawn: bool) -> str:
    name, title = table.name, html.escape(table.title)
    plot = f'<p><img src="{name}.png" alt="{title}"></p>' if drawn else ""
    body = "".join(
        f"<tr>{''.join(f'<td>{html.escape(_text(x))}</td>' for x in row.values())}</tr>"
        for row in table.rows[:ROWS]
    )
    head = "".join(f"<th>{html.escape(x)}</th>" for x in (table.rows[0] if table.rows else ()))
    cut = f"<p>The first {ROWS} of {len(table.rows)} rows.</p>" if len(table.rows) > ROWS else ""
    return (
        f'<h2>{title}</h2>\n<p>{html.escape(table.note)} <a href="{name}.csv">{name}.csv</a></p>\n'
        f"{plot}\n<details><summary>Table</summary>"
        f"{cut}<table><tr>{head}</tr>{body}</table></details>"
    )


def _text(value) -> str:
    return f"{value:.5f}" if isinstance(value, float) else str(value)
