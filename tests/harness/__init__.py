"""Runs a real, unmodified SGLang Scheduler in a forked child, without HTTP, one scenario at a time.

    result = run_scenario(model, [Req(ids, max_new_tokens=8)], server_args={"chunked_prefill_size": 64})
    assert result["r0-"].output_ids == expected

A child imports nothing: it is forked from a server that has SGLang loaded already. It resolves its
arguments exactly as ``sglang.launch_server`` does, builds the Scheduler as the scheduler process
does, and runs SGLang's own event loop; only the two ends of its sockets are replaced, so that
requests arrive at known loop iterations and a test sees the scheduler between any two of them.
README.md in this folder says what a scenario can do and where it differs from a server.
"""

from tests.harness.control import Control
from tests.harness.run import run_scenario
from tests.harness.scenario import (
    BatchRecord,
    Output,
    Req,
    Result,
    ScenarioDied,
    ScenarioError,
    ScenarioFailed,
    ScenarioTimeout,
)

__all__ = [
    "BatchRecord",
    "Control",
    "Output",
    "Req",
    "Result",
    "ScenarioDied",
    "ScenarioError",
    "ScenarioFailed",
    "ScenarioTimeout",
    "run_scenario",
]
