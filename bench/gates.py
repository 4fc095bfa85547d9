"""What scorer fastkvzip costs beside others, at equal bytes: KL to full KV with the same share of every head.

    python -m bench.gates [--documents 3] [--retention 0.3] [--gates FILE] [--out bench/results/gates.csv]

Documents of `bench/documents.py`, none of them a text that gates or statistics were made from, run cold
through SGLang itself: on full KV, and with each scorer under uniform budgets. The queries measured are
those behind 2,048 tokens (`--border`) and R more, which all see four windows sealed. KL is exact, over the whole
vocabulary (`bench/branches.py`).
"""

import argparse
import math
import shutil
import sys
import tempfile
import time
from pathlib import Path

from msgspec.structs import replace

from bench.branch_engine import BranchEngine
from bench.branches import LOGPROB_TOLERANCE
from bench.divergence import Head
from bench.documents import SOURCES, Document, load
from bench.record import RESULTS, append_csv, machine, say
from bench.smollm2 import MODEL_DIR
from tangram_sglang.cli.demo import PLANS, nearest_plan
from tangram_sglang.cli.retention import retention
from tangram_sglang.plan.file import load_plan, save_plan
from tangram_sglang.settings import Settings

SCORERS = ("keydiff", "expected_attention", "fastkvzip")
QUERIES = 256


def uniform_plan(path: Path, folder: Path) -> Path:
    """The plan at ``path`` with the same budget for every head, and its statistics, in ``folder``."""
    plan = load_plan(path)
    shutil.copy(path.parent / plan.selection.stats_file, folder)
    same = [plan.calibration.retention] * len(plan.budgets)
    save_plan(replace(plan, budgets=same), folder / "uniform.json")
    return folder / "uniform.json"


def measure(size: argparse.Namespace, documents: list[Document], plan: Path) -> dict[str, list]:
    """Mean KL of each document by scorer."""
    head = Head.of(size.model)
    first = size.border + Settings().recent

    def hidden(settings: dict[str, str]):
        say(f"{time.strftime('%H:%M:%S')} starting an engine, {settings}")
        with BranchEngine(size.model, settings) as engine:
            for document in documents:
                seen = engine.see(document.ids, first)
                found = seen.queries(first, first + QUERIES)
                tokens = list(document.ids[first + 1 :])
                # the last query predicts a token that is not there
                gap = head.gap(found[:-1], tokens, seen.logprobs)
                if not gap <= LOGPROB_TOLERANCE:
                    raise RuntimeError(f"{document.name}: hidden states are {gap:g} off SGLang's")
                say(f"{time.strftime('%H:%M:%S')}   {document.name}")
                yield found

    full = list(hidden({"TANGRAM_RETENTION": "1.0"}))
    common = {"TANGRAM_PLAN": str(plan), "TANGRAM_RETENTION": f"{size.retention:g}"}
    common["TANGRAM_GATES"] = str(size.gates)
    return {
        name: [
            float(head.kl(whole, found).mean())
            for whole, found in zip(full, hidden({**common, "TANGRAM_SCORER": name}), strict=True)
        ]
        for name in size.scorers
    }


def table(documents: list[Document], kl: dict[str, list]) -> str:
    """KL in thousandths of a nat: a line a document, then the geometric mean."""
    lines = [f"{'KL to full KV x 1000':28}" + "".join(f"{name:>20}" for name in kl)]
    for i, document in enumerate(documents):
        lines.append(f"{document.name:28}" + "".join(f"{1000 * x[i]:20.2f}" for x in kl.values()))
    means = [math.exp(sum(map(math.log, x)) / len(x)) for x in kl.values()]
    lines.append(f"{'geometric mean':28}" + "".join(f"{1000 * x:20.2f}" for x in means))
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--retention", type=retention, default=0.3, help="(%(default)s)")
    parser.add_argument("--gates", type=Path, help="default: the shipped ones")
    parser.add_argument("--documents", type=int, default=3, help="how many (%(default)s)")
    parser.add_argument("--border", type=int, default=2048, help="tokens before it (%(default)s)")
    parser.add_argument(
        "--scorers",
        type=lambda text: tuple(text.split(",")),
        default=SCORERS,
        help=f"({','.join(SCORERS)})",
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "gates.csv", help="(%(default)s)")
    size = parser.parse_args()
    size.gates = size.gates or PLANS / f"{size.model.name.lower()}-gates.safetensors"
    return size


def main() -> int:
    size = arguments()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(size.model)
    everything = load(tokenizer, size.border + Settings().recent + QUERIES)
    documents = everything[:: max(1, len(SOURCES) // size.documents)][: size.documents]
    with tempfile.TemporaryDirectory(prefix="tangram-gates-") as folder:
        plan = uniform_plan(nearest_plan(PLANS, size.retention), Path(folder))
        kl = measure(size, documents, plan)
    print(table(documents, kl))
    common = {"model": size.model.name, "retention": size.retention, "budgets": "uniform"}
    common["border"] = size.border
    rows = [
        {"document": d.name, "scorer": name, "kl": f"{x:.6f}", "tokens_sha256": d.digest, **common}
        | machine("bench.gates")
        for name, values in kl.items()
        for d, x in zip(documents, values, strict=True)
    ]
    append_csv(size.out, rows)
    say(f"written to {size.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
