"""The files through which a server in observe mode and the calibration that started it talk.

    request.json      calibration -> observer: what to measure; read again whenever it changes
    queries.npz       shape of the model and sums over its queries; rewritten after each pass
    window-00000.npz  shares of one window, by profile and scope
    error-00000.npz   what a window's compression does to the attention output, head by head

Files appear whole: they are written beside their name and renamed. Readers also take files with a
name in front, as ``run_folder.py`` keeps them: ``p003-window-00000.npz``.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from tangram_sglang.calib.moments import QueryMoments
from tangram_sglang.errors import TangramError
from tangram_sglang.plan.shape import LayerShape, ModelShape

RETENTIONS = tuple(round(0.05 * i, 2) for i in range(1, 20))


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What calibration asks of the observer.

    Attributes:
        profiles: scorers to profile.
        retentions: retentions to take shares at.
        moments: sum over queries.
        sums: file of sums to go on from, a path like those of ``queries.npz``.
        stats_file, stats_hash: query statistics for the scorers that read them.
        error: scorer under whose selection errors are measured, or None.
    """

    profiles: list[str] = msgspec.field(default_factory=lambda: ["keydiff"])
    retentions: list[float] = msgspec.field(default_factory=lambda: list(RETENTIONS))
    moments: bool = True
    sums: str | None = None
    stats_file: str | None = None
    stats_hash: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Queries:
    """Sums over the queries of all full-attention layers.

    Attributes:
        shape: the full-attention layers.
        inv_freq: [L, rotary_dim / 2] fp64.
        count: queries summed per query head.
        total: [L, HQ, D] fp64.
        square: [L, HQ, D, D] fp64.
    """

    shape: ModelShape
    inv_freq: np.ndarray
    count: int
    total: np.ndarray
    square: np.ndarray


def write_request(out: Path, request: Request) -> None:
    """Tell the observer that writes to ``out`` what to measure from its next pass on."""
    partial = out / ".request.partial.json"
    partial.write_bytes(msgspec.json.encode(request))
    os.replace(partial, out / "request.json")


def read_request(out: Path) -> Request:
    """What was asked; the defaults where nobody asked."""
    path = out / "request.json"
    if not path.exists():
        return Request()
    return msgspec.json.decode(path.read_bytes(), type=Request)


def write_queries(
    out: Path, shape: ModelShape, inv_freq: np.ndarray, moments: Sequence[QueryMoments]
) -> None:
    """Write the sums of ``shape.layers``, all of which saw the same queries."""
    _write(
        out / "queries.npz",
        layers=np.array([(x.layer_id, x.q_heads, x.kv_heads, x.head_dim) for x in shape.layers]),
        scaling=np.array([x.scaling for x in shape.layers]),
        inv_freq=inv_freq,
        count=np.array(moments[0].count),
        total=np.stack([m.total.numpy() for m in moments]),
        square=np.stack([m.square.numpy() for m in moments]),
    )


def read_queries(path: Path) -> Queries:
    """Sums of a file, or of the ``queries.npz`` in a folder."""
    path = path / "queries.npz" if path.is_dir() else path
    if not path.exists():
        raise TangramError(f"{path} does not exist: the server saw no queries; see its log")
    with np.load(path) as found:
        layers = [
            LayerShape(*(int(x) for x in row), None, float(scaling))
            for row, scaling in zip(found["layers"], found["scaling"], strict=True)
        ]
        return Queries(
            ModelShape(tuple(layers)),
            found["inv_freq"],
            int(found["count"]),
            found["total"],
            found["square"],
        )


def write_window(out: Path, index: int, start: int, shares: dict[str, np.ndarray]) -> None:
    """Write the shares of one window, each [len(retentions), H], by profile_key."""
    _write(out / f"window-{index:05}.npz", start=np.array(start), **shares)


def count_windows(out: Path) -> int:
    """Windows whose shares were written."""
    return sum(1 for _ in out.glob("*window-*.npz"))


def windows_of(out: Path, key: str) -> dict[str, np.ndarray]:
    """One array of every window file that has it, by file name, in the order they were seen."""
    return _arrays(out, "*window-*.npz", key)


def write_error(out: Path, index: int, start: int, curves: np.ndarray, power: np.ndarray) -> None:
    """Write the error curves of one window, [H, len(grid)], and each head's layer's power, [H]."""
    _write(out / f"error-{index:05}.npz", start=np.array(start), curves=curves, power=power)


def errors_of(out: Path, key: str) -> dict[str, np.ndarray]:
    """``curves`` or ``power`` of every window whose error was measured, by file name."""
    return _arrays(out, "*error-*.npz", key)


def profile_key(profile: str, scope: str) -> str:
    """Name of an array of shares in a window's file."""
    return f"{profile}.{scope}"


def _arrays(out: Path, pattern: str, key: str) -> dict[str, np.ndarray]:
    found = {}
    for path in sorted(out.glob(pattern)):
        with np.load(path) as arrays:
            if key in arrays:
                found[path.name] = arrays[key]
    return found


def _write(path: Path, **arrays: np.ndarray) -> None:
    # numpy appends .npz to a name without it; the name must not look like a window's to readers
    partial = path.with_name(f".partial-{os.getpid()}.npz")
    np.savez(partial, **arrays)
    os.replace(partial, path)
