"""The report's plots: one PNG for each table, where matplotlib is installed."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from tangram_sglang.calib.report_tables import Table


def draw(table: Table, folder: Path) -> Path | None:
    """Draw a table; None for those that have no plot."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    if table.name not in PLOTS or not table.rows:
        return None
    retentions = _values(table.rows, "retention")
    figure, axes = pyplot.subplots(
        1, len(retentions), figsize=(5.2 * len(retentions), 4.2), squeeze=False, sharey=True
    )
    for axis, retention in zip(axes[0], retentions, strict=True):
        PLOTS[table.name](axis, [x for x in table.rows if x["retention"] == retention])
        axis.set_title(f"retention {retention:g}")
    figure.suptitle(table.title)
    figure.tight_layout()
    path = folder / f"{table.name}.png"
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _heat(axis, rows: list[dict]) -> None:
    layers = _values(rows, "layer")
    heads = 1 + max(x["head"] for x in rows)
    image = np.full((heads, len(layers)), np.nan)
    for x in rows:
        image[x["head"], layers.index(x["layer"])] = x["held"]
    drawn = axis.imshow(image, vmin=0, vmax=1, aspect="auto", cmap="viridis", origin="lower")
    axis.set_xlabel("layer")
    axis.set_ylabel("KV head")
    axis.set_xticks(range(0, len(layers), 5), layers[::5])
    axis.figure.colorbar(drawn, ax=axis, label="share held")


def _spread(axis, rows: list[dict]) -> None:
    order = sorted(rows, key=lambda x: -x["asked"])
    asked = [x["asked"] for x in order]
    axis.errorbar(range(len(order)), asked, [x["spread"] for x in order], fmt=".", elinewidth=0.6)
    axis.set_xlabel("head, by budget")
    axis.set_ylabel("budget asked, and one spread")


def _regularity(axis, rows: list[dict]) -> None:
    profiles = _values(rows, "profile")
    for kind in _values(rows, "kind"):
        mine = [x for x in rows if x["kind"] == kind]
        offset = 0.6 * (_values(rows, "kind").index(kind) / len(_values(rows, "kind")) - 0.4)
        at = [profiles.index(x["profile"]) + offset for x in mine]
        axis.plot(at, [x["spearman"] for x in mine], ".", label=kind, alpha=0.6)
    axis.set_xticks(range(len(profiles)), profiles, rotation=20)
    axis.set_ylabel("Spearman with the other samples' mean")
    axis.legend(fontsize=7)


def _clipping(axis, rows: list[dict]) -> None:
    names = [f"{x['profile']}\nalpha {x['alpha']:g}" for x in rows]
    at = np.arange(len(rows))
    axis.bar(at - 0.2, [x["clipped"] for x in rows], 0.4, label="as asked")
    axis.bar(at + 0.2, [x["clipped_rescaled"] for x in rows], 0.4, label="rescaled")
    axis.set_xticks(at, names, fontsize=7, rotation=45)
    axis.set_ylabel("share of demand clipped")
    axis.legend(fontsize=7)


def _memory(axis, rows: list[dict]) -> None:
    at = np.arange(len(rows))
    for i, name in enumerate(("asked", "asked_in_pages", "served")):
        axis.bar(at + 0.27 * (i - 1), [x[name] for x in rows], 0.27, label=name.replace("_", " "))
    axis.axhline(rows[0]["retention"], color="black", lw=0.8)
    axis.set_xticks(at, [f"alpha {x['alpha']:g}" for x in rows])
    axis.set_ylabel("share of a sealed window's bytes")
    axis.legend(fontsize=7)


def _grouping(axis, rows: list[dict]) -> None:
    for scheme in _values(rows, "scheme"):
        mine = [x for x in rows if x["scheme"] == scheme]
        axis.plot(
            [x["group_heads"] for x in mine], [x["reclaimed"] for x in mine], "o-", label=scheme
        )
    axis.axhline(1 - rows[0]["retention"], color="black", lw=0.8)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("heads per group")
    axis.set_ylabel("share of bytes reclaimed")
    axis.legend(fontsize=7)


def _samples(axis, rows: list[dict]) -> None:
    for profile in _values(rows, "profile"):
        mine = [x for x in rows if x["profile"] == profile]
        axis.errorbar(
            [x["samples"] for x in mine],
            [x["clipped"] for x in mine],
            [x["clipped_spread"] for x in mine],
            fmt="o-",
            label=profile,
        )
    axis.set_xlabel("samples")
    axis.set_ylabel("demand clipped in other windows")
    axis.legend(fontsize=7)


def _kinds(axis, rows: list[dict]) -> None:
    kinds = _values(rows, "kind")
    profiles = _values(rows, "profile")
    for i, profile in enumerate(profiles):
        mine = [x for x in rows if x["profile"] == profile]
        at = [kinds.index(x["kind"]) + 0.8 * ((i + 0.5) / len(profiles) - 0.5) for x in mine]
        axis.bar(at, [x["spearman"] for x in mine], 0.8 / len(profiles), label=profile)
    axis.set_xticks(range(len(kinds)), kinds, rotation=20)
    axis.set_ylabel("Spearman with the other kinds")
    axis.legend(fontsize=7)


def _values(rows: list[dict], name: str) -> list:
    return list(dict.fromkeys(x[name] for x in rows))


PLOTS: dict[str, Callable] = {
    "budgets": _heat,
    "spread": _spread,
    "regularity": _regularity,
    "clipping": _clipping,
    "memory": _memory,
    "grouping": _grouping,
    "samples": _samples,
    "kinds": _kinds,
}
