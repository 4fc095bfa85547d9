"""Several experiments on servers that are started once: starting three costs more than a minute.

    python -m bench.suite [options of all] "offline --cases long mid" "arrival --rates 0.7"

Options of the servers, and of all experiments, are given once and in front. Each experiment is one
argument: its name, then options of its own, --repeats and --csv. The first is finished on all servers
of a group before the second begins; one that fails does not end the others, but the exit status is 1
then. --limit-s counts from the start of the suite, and the gate is passed once for all.

Experiments: offline, multi_turn, arrival, shared_document, server_decode, breakdown. Those that need
servers of their own, ablation and reclaim, are run by themselves.
"""

import argparse
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench import (
    ablation,
    arrival,
    breakdown,
    multi_turn,
    offline,
    reclaim,
    server_decode,
    shared_document,
)
from bench.experiment import Experiment, add_common
from bench.record import RESULTS
from bench.session import Asked, run

MODULE = "bench.suite"
KNOWN = {
    x.EXPERIMENT.name: x.EXPERIMENT
    for x in (
        *(offline, multi_turn, arrival, shared_document, server_decode, breakdown),
        *(ablation, reclaim),
    )
}


def common_parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog=f"python -m {MODULE}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage='%(prog)s [options of all] "EXPERIMENT [its options]" ...',
        epilog="Pool tokens and requests at once are by default the experiments' own: their common "
        "pool, and the most requests of any.",
    )
    add_common(found, None, None)
    found.add_argument("--repeats", type=int, help="where an experiment does not say otherwise")
    found.add_argument("--results", type=Path, default=RESULTS, help="of CSV files (%(default)s)")
    return found


def divided(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Options in front, and experiments: the first is known, or has options of its own.

    argparse would take an experiment for one more value of an option that has several.
    """
    for at, given in enumerate(arguments):
        first = given.split(maxsplit=1)[:1]
        if first and (first[0] in KNOWN or re.match(r"[^-\s]\S*\s+--", given)):
            return list(arguments[:at]), list(arguments[at:])
    return list(arguments), []


def asked_for(arguments: Sequence[str]) -> list[Asked]:
    """Experiments and their options; SystemExit says what is wrong with them."""
    front, texts = divided(arguments)
    common, more = common_parser().parse_known_args(front)
    if unknown := [x for x in more if x.startswith("-")]:
        raise SystemExit(f"error: {unknown[0]} is no option of all experiments")
    words = [given for text in (*more, *texts) if (given := words_of(text))]
    if not words:
        raise SystemExit(f"error: no experiment; known: {', '.join(KNOWN)}")
    found = [(experiment_of(given[0]), given[1:]) for given in words]
    experiments = [experiment for experiment, _ in found]
    if common.pool_tokens is None:
        common.pool_tokens = pool_of(experiments)
    common.max_running = common.max_running or max(x.running for x in experiments)
    return [(experiment, own(experiment, given, common)) for experiment, given in found]


def words_of(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise SystemExit(f"error: {text}: {error}") from None


def experiment_of(name: str) -> Experiment:
    if name not in KNOWN:
        raise SystemExit(f"error: unknown experiment {name}; known: {', '.join(KNOWN)}")
    if KNOWN[name].has_own_servers:
        raise SystemExit(f"error: {name} needs servers of its own: run python -m bench.{name}")
    return KNOWN[name]


def pool_of(experiments: Iterable[Experiment]) -> int:
    """Tokens of the pool that all have by default."""
    found = {x.name: x.pool_tokens for x in experiments}
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{name} {tokens}" for name, tokens in found.items())
        raise SystemExit(f"error: pools differ ({listed}): say with --pool-tokens which all get")
    return next(iter(found.values()))


def own(
    experiment: Experiment, given: Sequence[str], common: argparse.Namespace
) -> argparse.Namespace:
    """All options of one experiment, of which only its own may be given beside its name."""
    prog = f"{MODULE}: {experiment.name}"
    parser = argparse.ArgumentParser(prog=prog, add_help=False, allow_abbrev=False)
    experiment.add_own(parser, common.results)
    if common.repeats is not None:
        parser.set_defaults(repeats=common.repeats)
    options, unknown = parser.parse_known_args(given)
    if unknown:
        raise SystemExit(
            f"error: {experiment.name}: {unknown[0]} is no option of its own; what all experiments "
            "and their servers share is given once, in front"
        )
    shared = {key: value for key, value in vars(common).items() if key != "repeats"}
    return argparse.Namespace(**{**vars(options), **shared})


def main() -> None:
    sys.exit(run(MODULE, asked_for(sys.argv[1:])))


if __name__ == "__main__":
    main()
