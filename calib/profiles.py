"""What a finished run says of each profile: its samples and its budgets at any retention taken."""

from dataclasses import dataclass, field

import numpy as np

from tangram_sglang.calib.allocate import allocate
from tangram_sglang.calib.budgets import (
    Budgets,
    average,
    error_budgets,
    relative_errors,
    share_budgets,
)
from tangram_sglang.calib.error_curves import grid
from tangram_sglang.calib.observations import Queries, read_queries
from tangram_sglang.calib.run_folder import RunFolder, prompt_of

ERROR = "error"
# whose shares are recorded for TANGRAM_DRIFT: reads K alone, so that watching is cheap
DRIFT = "keydiff"
DRIFT_ALPHA = 2.0


@dataclass(frozen=True)
class Samples:
    """What was measured of one profile, window by window.

    Attributes:
        profile: a scorer's name or ``error``.
        data: shares [N, H], or error curves [N, H, G].
        prompts: [N], the prompt that each window is of.
        kinds: [N], the kind of its text.
        kept: [G], for error curves.
        layer_heads: heads of each layer where the scope is the layer, else None.
    """

    profile: str
    data: np.ndarray
    prompts: np.ndarray
    kinds: np.ndarray
    kept: tuple[float, ...]
    layer_heads: tuple[int, ...] | None
    _best: dict[float, np.ndarray] = field(default_factory=dict, repr=False)

    def budgets(self, retention: float, alpha: float, chosen=slice(None)) -> Budgets:
        """Budgets from the windows ``chosen``, an index or a mask."""
        if self.profile != ERROR:
            return share_budgets(self.data[chosen], alpha)
        shares = self.shares(retention)[chosen]
        return error_budgets(self.data[chosen], self.kept, retention, shares, self.layer_heads)

    def shares(self, retention: float) -> np.ndarray:
        """What each window asks for, [N, H]; of errors, the budgets that are best for it alone."""
        if self.profile != ERROR:
            return self.data
        if retention not in self._best:
            self._best[retention] = np.stack(
                [allocate(curve, self.kept, retention, self.layer_heads) for curve in self.data]
            )
        return self._best[retention]


def queries_of(folder: RunFolder) -> Queries:
    """Sums over the queries of all prompts."""
    return read_queries(folder.sums() or folder.stage("first"))


def samples(folder: RunFolder, profile: str, scope: str, retention: float) -> Samples:
    """What ``folder`` holds of ``profile``."""
    layer_heads = tuple(x.kv_heads for x in queries_of(folder).shape.layers)
    kept: tuple[float, ...] = ()
    if profile == ERROR:
        window = folder.run.window
        found, power = folder.errors()
        kept = tuple(point / window for point in grid(window))
        relative = relative_errors(
            np.stack(list(found.values())), np.stack(list(power.values())), layer_heads
        )
        found = dict(zip(found, relative, strict=True))
    else:
        found = folder.shares(profile, scope, retention)
    prompts = np.array([prompt_of(name) for name in found])
    kinds = np.array([folder.run.texts[i][0] for i in prompts])
    return Samples(
        profile,
        np.stack(list(found.values())),
        prompts,
        kinds,
        kept,
        layer_heads if scope == "layer" else None,
    )


def drift_limits(folder: RunFolder, scope: str, retention: float) -> np.ndarray:
    """[H], mean + 2 standard deviations of each head's share by ``DRIFT``."""
    return samples(folder, DRIFT, scope, retention).budgets(retention, DRIFT_ALPHA).budgets


def plan_budgets(folder: RunFolder, scope: str, retention: float, alpha: float) -> Budgets:
    """The mean budgets of all profiles of a run, as its plan holds them."""
    return average(
        [
            samples(folder, profile, scope, retention).budgets(retention, alpha)
            for profile in folder.run.profiles
        ]
    )
