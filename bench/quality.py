"""What compression does to answers: KL and top-1 agreement with full KV, and facts retrieved.

    tangram calibrate --model M --budgets-from keydiff,expected_attention,error --retention 0.3 \\
        --samples 50 --out build/plans
    python -m bench.quality --observations build/plans/<model>-observations [--retention 0.5,0.3,0.2]
        [--scorers keydiff,expected_attention] [--budgets uniform,own,mean] [--device cuda]

Every scorer picks tokens under uniform budgets and under calibrated ones at equal bytes, on texts that
are no calibration texts: documents read in turns, where the tokens of each turn's answer are compared
with full KV (teacher forced), and chats that ask for facts in turns. Turn 1 and later turns are apart.
Budgets: ``uniform``; ``own``, the scorer's own profile; any profile of the observations; ``a+b``, a mean
of some; ``mean``, of all; ``keydiff@25``, from the first 25 windows only.

The engine is `bench/quality_engine.py`, a forward pass in this process. Rows go to a CSV as they are
measured, and what is there already is not measured again.
"""

import argparse
import contextlib
import hashlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from bench.quality_engine import SHOWN, Lane, compare, hidden_states, model_shape
from bench.quality_table import FULL, publish, read
from bench.quality_texts import ALL, Text, documents, fact_chats
from bench.record import RESULTS, append_csv, say
from bench.smollm2 import MODEL_DIR
from tangram_sglang.calib.budgets import average
from tangram_sglang.calib.profiles import queries_of, samples
from tangram_sglang.calib.query_stats import save_query_stats
from tangram_sglang.calib.run_folder import RunFolder
from tangram_sglang.calib.stages import RANK
from tangram_sglang.cli.demo import PLANS
from tangram_sglang.cli.retention import retention
from tangram_sglang.errors import TangramError
from tangram_sglang.plan.gates import load_gates
from tangram_sglang.plan.layout import KVLayout
from tangram_sglang.plan.stats import load_query_stats
from tangram_sglang.plan.window import WindowRule
from tangram_sglang.score import SCORERS, create_scorer
from tangram_sglang.score.gate import Gates
from tangram_sglang.settings import GROUPINGS, Settings


@dataclass(frozen=True, slots=True)
class Unit:
    """One way to compress, by name.

    Attributes:
        scorer: picks tokens.
        budgets: ``uniform`` or profiles, as on the command line.
        retention: rho.
    """

    scorer: str
    budgets: str
    retention: float


class Plans:
    """Layouts and statistics from the observations of a calibration."""

    def __init__(self, folder: RunFolder, model, scratch: Path, options: argparse.Namespace):
        self._folder, self._scope, self._alpha = folder, options.scope, options.alpha
        self._shape = model_shape(model)
        run = folder.run
        settings = Settings(grouping=options.grouping, group_heads=options.group_heads)
        recent = run.recent if options.recent is None else options.recent
        self.rule = WindowRule(run.window, recent, settings.page, run.sinks)
        # making one takes half a second, and every text asks for it
        self._layouts: dict[Unit, KVLayout] = {}
        self._settings, self._tokens = settings, model.config.max_position_embeddings
        self._stats_file = scratch / "query-stats.safetensors"
        self._device, self._config = model.device, model.config
        if queries_of(folder).shape.full_heads != self._shape.full_heads:
            raise TangramError(f"{folder.path} is a calibration of another model, {run.model}")

    @property
    def shared(self) -> dict[str, str]:
        """What all units share, for the CSV files."""
        return {
            **{"window": str(self.rule.window), "recent": str(self.rule.recent)},
            **{"scope": self._scope, "alpha": f"{self._alpha:g}"},
            **{"grouping": self._settings.grouping},
            **{"group_heads": str(self._settings.group_heads)},
        }

    def layout(self, unit: Unit) -> KVLayout:
        if unit not in self._layouts:
            self._layouts[unit] = self._layout(unit)
        return self._layouts[unit]

    def _layout(self, unit: Unit) -> KVLayout:
        return KVLayout.build(
            self._shape,
            self.rule,
            budgets=self.budgets(unit.budgets, unit.retention),
            retention=unit.retention,
            per_group=self._settings.group_heads,
            grouping=self._settings.grouping,
            max_tokens=self._tokens,
        )

    def budgets(self, name: str, rho: float) -> list[float]:
        """Budgets of every head by their name."""
        if name == "uniform":
            return [rho] * len(self._shape.full_heads)
        profiles = self._folder.run.profiles if name == "mean" else name.split("+")
        found = []
        for profile in profiles:
            profile, _, count = profile.partition("@")
            taken = samples(self._folder, profile, self._scope, rho)
            windows = len(taken.data)
            if count and not (count.isdecimal() and 1 < int(count) < windows):
                raise TangramError(
                    f"--budgets {name}: {profile} has {windows} windows, expected a number of at least 2 "
                    "and fewer than these"
                )
            chosen = slice(int(count)) if count else slice(None)
            found.append(taken.budgets(rho, self._alpha, chosen))
        return average(found).budgets.tolist()

    def lane(self, unit: Unit) -> Lane:
        needs = create_scorer(unit.scorer).needs
        stats = self.stats if "query_stats" in needs else None
        gates = self.gates if "hidden" in needs else None
        return Lane(self.layout(unit), unit.scorer, stats, gates)

    @cached_property
    def stats(self):
        sha256 = save_query_stats(queries_of(self._folder), RANK, self._stats_file)
        return load_query_stats(self._stats_file, sha256, self._shape, self._device)

    @cached_property
    def gates(self) -> Gates:
        """The shipped gates of the model."""
        path = PLANS / f"{self._folder.run.model.lower()}-gates.safetensors"
        gates = load_gates(path, self._config).gates
        return gates.to(self._device).projected_in(torch.float32)


def units(size: argparse.Namespace, profiles: list[str]) -> list[Unit]:
    """All that is to be measured."""
    found = []
    for rho in size.retention:
        for scorer in size.scorers:
            for budgets in size.budgets:
                name = scorer if budgets == "own" else budgets
                if budgets == "own" and scorer not in profiles:
                    continue
                found.append(Unit(scorer, name, rho))
    return list(dict.fromkeys(found))


def measure(
    model, text: Text, wanted: list[Unit], plans: Plans, batch: int
) -> Iterator[list[dict]]:
    """Rows of every unit on one text, some units at a time; first those of full KV."""
    positions = torch.cat([torch.arange(*turn) for turn in text.turns])
    full_lane = Lane(plans.layout(Unit("keydiff", "uniform", 1.0)), "keydiff")
    began = time.perf_counter()
    full = hidden_states(model, text.ids, [full_lane], positions)[0]
    yield _rows(model, text, Unit(FULL, FULL, 1.0), full, full, 1.0, began, 1)
    for first in range(0, len(wanted), batch):
        mine = wanted[first : first + batch]
        lanes = [plans.lane(unit) for unit in mine]
        began = time.perf_counter()
        hidden = hidden_states(model, text.ids, lanes, positions)
        rows = []
        for unit, lane, found in zip(mine, lanes, hidden, strict=True):
            held = lane.layout.retention_held
            rows += _rows(model, text, unit, full, found, held, began, len(mine))
        yield rows


def _rows(model, text: Text, unit: Unit, full, found, held, began, together) -> list[dict]:
    """One row a turn."""
    kl, agree = compare(model, full, found)
    right = _right(model, text, found)
    seconds = (time.perf_counter() - began) / together
    rows, first = [], 0
    for number, (begin, end) in enumerate(text.turns):
        span = slice(first, first + end - begin)
        first = span.stop
        rows.append(
            {
                **{"text": text.name, "kind": text.kind, "task": text.task},
                **{"tokens_sha256": text.digest, "turn": number + 1, "queries": end - begin},
                **{"scorer": unit.scorer, "budgets": unit.budgets, "retention": unit.retention},
                **{"held": f"{held:.5f}", "kl": f"{float(kl[span].mean()):.6f}"},
                "top1": f"{float(agree[span].float().mean()):.5f}",
                "right": "" if right is None else int(right[span].all()),
                "seconds": f"{seconds:.2f}",
            }
        )
    return rows


def _right(model, text: Text, found: torch.Tensor) -> torch.Tensor | None:
    """Whether each query of a fact's answer predicts the right token, [N]."""
    if not text.answers:
        return None
    expected = torch.tensor([token for answer in text.answers for token in answer])
    return model.lm_head(found).argmax(dim=-1).cpu() == expected


def arguments(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--observations", type=Path, required=True, help="of tangram calibrate")
    parser.add_argument(
        "--retention",
        type=lambda text: tuple(retention(x) for x in text.split(",")),
        default=(0.5, 0.3, 0.2),
    )
    split = {"type": lambda text: tuple(text.split(","))}
    parser.add_argument("--scorers", **split, help="(all that can be shown what they read)")
    parser.add_argument("--budgets", **split, help="(uniform, own, every profile, mean)")
    parser.add_argument("--scope", choices=("global", "layer"), default="global")
    parser.add_argument("--alpha", type=float, default=2.0)
    parser.add_argument("--recent", type=int, help="R (the calibration's)")
    parser.add_argument("--grouping", choices=GROUPINGS, default=Settings().grouping)
    parser.add_argument("--group-heads", type=int, default=Settings().group_heads, help="H_p")
    parser.add_argument("--texts", type=int, default=len(ALL), help="documents (%(default)s)")
    parser.add_argument("--chats", type=int, default=16, help="chats about facts (%(default)s)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=4, help="ways to compress run together")
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "quality", help="folder (%(default)s)"
    )
    size = parser.parse_args(argv)
    size.scorers = size.scorers or tuple(
        name for name in sorted(SCORERS) if not create_scorer(name).needs - SHOWN
    )
    return size


def main() -> int:
    size = arguments()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        folder = RunFolder.read(size.observations)
        size.budgets = size.budgets or ("uniform", "own", *folder.run.profiles, "mean")
        tokenizer = AutoTokenizer.from_pretrained(size.model)
        model = AutoModelForCausalLM.from_pretrained(size.model, dtype=torch.float32)
        model = model.to(size.device).eval()
        size.out.mkdir(parents=True, exist_ok=True)
        plans = Plans(folder, model, size.out, size)
        texts = [*documents(tokenizer, size.texts), *fact_chats(tokenizer, size.chats)]
        wanted = units(size, folder.run.profiles)
        rows = _measure_all(model, texts, wanted, plans, size)
    except (TangramError, ValueError, OSError) as error:
        say(f"error: {error}")
        return 2
    finally:
        with contextlib.suppress(NotADirectoryError):
            (size.out / "query-stats.safetensors").unlink(missing_ok=True)
    publish(rows, size.out, "bench.quality")
    return 0


def _measure_all(model, texts, wanted: list[Unit], plans: Plans, size) -> list[dict]:
    """Rows of all texts and units, measured or read."""
    path = size.out / "texts.csv"
    found: dict[tuple[str, str], list[dict]] = {}
    for row in read(path, size.model.name):
        found.setdefault((row["tokens_sha256"], row["unit"]), []).append(row)
    kept, took = [], []
    for number, text in enumerate(texts):
        known = {key: rows for key, rows in found.items() if key[0] == text.digest}
        left = [x for x in wanted if _key(text, x, plans) not in known]
        mine = {key for x in wanted if (key := _key(text, x, plans)) in known}
        mine.add(_key(text, Unit(FULL, FULL, 1.0), plans))
        kept += [row for key, rows in known.items() if key in mine for row in rows]
        if not left:
            continue
        for rows in measure(model, text, left, plans, size.batch):
            is_full = rows[0]["scorer"] == FULL
            rows = [_with_key(row, text, plans, size) for row in rows]
            if is_full and _key(text, Unit(FULL, FULL, 1.0), plans) in known:
                continue
            append_csv(path, rows)
            kept += rows
            if not is_full:
                took.append(float(rows[0]["seconds"]))
        say(
            f"{time.strftime('%H:%M:%S')} {number + 1}/{len(texts)} {text.name}: "
            f"{np.median(took):.2f} s a way to compress"
        )
    return kept


def _key(text: Text, unit: Unit, plans: Plans) -> tuple[str, str]:
    """What a row is a measurement of: tokens, and what every head keeps and who picks it."""
    if unit.scorer == FULL:
        return text.digest, FULL
    layout = plans.layout(unit)
    kept = ",".join(str(layout.groups[layout.place[h][0]].kept) for h in sorted(layout.place))
    kept += f"/{plans.rule.recent}"
    named = f"{unit.scorer}/{unit.budgets}/{unit.retention:g}/"
    return text.digest, named + hashlib.sha256(kept.encode()).hexdigest()[:8]


def _with_key(row: dict, text: Text, plans: Plans, size) -> dict:
    unit = Unit(row["scorer"], row["budgets"], row["retention"])
    where = {
        **{"model": size.model.name, "device": size.device, "torch": torch.__version__},
        **plans.shared,
    }
    return {"unit": _key(text, unit, plans)[1], **row, **where}


if __name__ == "__main__":
    sys.exit(main())
