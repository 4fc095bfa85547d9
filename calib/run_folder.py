"""A calibration's measurements on disk, prompt by prompt, so that a run that was cut off goes on.

    run.json             what is measured, of what; a folder is only gone on with by the same run
    live/                where the server's observer writes
    first/               shares by scorers that read windows alone
      p003-window-*.npz    moved here from live/ when the prompt was answered
      queries-004.npz      sums over the queries of the first 4 prompts; written last, so it says
                           how many prompts are done
    second/              shares by scorers that read query statistics, and errors
      p003-window-*.npz, p003-error-*.npz
      done-004             how many prompts are done
    query-stats.safetensors, of the first stage

Knows files only, neither servers nor models.
"""

import os
import shutil
from pathlib import Path

import msgspec
import numpy as np

from tangram_sglang.calib import observations as files
from tangram_sglang.errors import TangramError


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a folder holds measurements of.

    Attributes:
        model: its id.
        config_hash: of its config.
        window: W.
        recent, sinks: R and the sinks, which decide which queries see a window sealed.
        profiles: what budgets are averaged from.
        selection: scorer that picks tokens when serving.
        retentions: those that shares are taken at.
        corpus_hash: of the texts.
        texts: (kind, name) of each prompt.
        tokens: of each prompt.
    """

    model: str
    config_hash: str
    window: int
    recent: int
    sinks: int
    profiles: list[str]
    selection: str
    retentions: list[float]
    corpus_hash: str
    texts: list[tuple[str, str]]
    tokens: list[int]


class RunFolder:
    """The folder of one run, made or gone on with."""

    def __init__(self, path: Path, run: Run):
        self.path, self.run = path, run
        self.live = path / "live"
        self.stats = path / "query-stats.safetensors"

    @classmethod
    def open(cls, path: Path, run: Run) -> "RunFolder":
        """The folder ``path`` for this run; TangramError where it holds another one."""
        record = path / "run.json"
        if record.exists():
            _check_same(read_run(path), run, path)
        elif path.exists() and any(path.iterdir()):
            raise TangramError(
                f"{path} is not empty and holds no calibration; name a new folder with "
                "--observations"
            )
        path.mkdir(parents=True, exist_ok=True)
        partial = path / ".run.partial.json"
        partial.write_bytes(msgspec.json.encode(run))
        os.replace(partial, record)
        folder = cls(path, run)
        for stage in ("first", "second"):
            (path / stage).mkdir(exist_ok=True)
            folder._drop_half_done(stage)
        return folder

    @classmethod
    def read(cls, path: Path) -> "RunFolder":
        """An existing folder, to read from."""
        return cls(path, read_run(path))

    def done(self, stage: str) -> int:
        """Prompts whose measurements are complete."""
        marks = [*self.stage(stage).glob("queries-*.npz"), *self.stage(stage).glob("done-*")]
        return max((int(mark.stem.rpartition("-")[2]) for mark in marks), default=0)

    def stage(self, stage: str) -> Path:
        """The folder of a stage, ``first`` or ``second``."""
        return self.path / stage

    def sums(self) -> Path | None:
        """Sums over the queries of all prompts that are done, or None before the first."""
        done = self.done("first")
        return self.stage("first") / f"queries-{done:03}.npz" if done else None

    def start(self, request: files.Request) -> None:
        """An empty live folder with ``request``."""
        self.live.mkdir(exist_ok=True)
        files.write_request(self.live, request)
        for path in self.live.glob("*.npz"):
            path.unlink()

    def commit(self, stage: str, prompt: int) -> None:
        """Keep what the observer wrote of ``prompt``, the next one of ``stage``."""
        folder = self.stage(stage)
        for path in sorted(self.live.glob("[we]*.npz")):
            os.replace(path, folder / f"p{prompt:03}-{path.name}")
        if stage == "first":
            before = self.sums()
            os.replace(self.live / "queries.npz", folder / f"queries-{prompt + 1:03}.npz")
            if before is not None:
                before.unlink()
        else:
            (folder / f"done-{prompt + 1:03}").touch()

    def shares(self, profile: str, scope: str, retention: float) -> dict[str, np.ndarray]:
        """Share of every head, [H], in each window of ``profile``, by file name."""
        key, row = files.profile_key(profile, scope), self.run.retentions.index(retention)
        for stage in ("first", "second"):
            found = files.windows_of(self.stage(stage), key)
            if found:
                return {name: shares[row] for name, shares in found.items()}
        raise TangramError(f"{self.path} has no window of profile {profile!r}")

    def errors(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Error curves [H, points] and power [H] of each window, by file name."""
        found = files.errors_of(self.stage("second"), "curves")
        if not found:
            raise TangramError(
                f"{self.path} has no errors: texts must go on for W + R tokens behind a window"
            )
        return found, files.errors_of(self.stage("second"), "power")

    def _drop_half_done(self, stage: str) -> None:
        done = self.done(stage)
        for path in self.stage(stage).glob("p*.npz"):
            if prompt_of(path.name) >= done:
                path.unlink()
        shutil.rmtree(self.live, ignore_errors=True)


def prompt_of(name: str) -> int:
    """Index of the prompt that a measurement's file belongs to."""
    return int(name[1 : name.index("-")])


def read_run(path: Path) -> Run:
    """What the folder ``path`` holds measurements of; TangramError where it holds none."""
    try:
        return msgspec.json.decode((path / "run.json").read_bytes(), type=Run)
    except (OSError, msgspec.DecodeError) as error:
        raise TangramError(
            f"{path} holds no calibration that can be read ({error}); name the folder that "
            "`tangram calibrate --observations` wrote"
        ) from None


def _check_same(found: Run, asked: Run, path: Path) -> None:
    for name in Run.__struct_fields__:
        a, b = getattr(found, name), getattr(asked, name)
        if a != b:
            raise TangramError(
                f"{path} holds measurements of another run: {name} is {_short(a)} there and "
                f"{_short(b)} here; repeat that command to go on with it, or name a new folder "
                "with --observations"
            )


def _short(value) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."
