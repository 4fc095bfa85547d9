"""What ``on_step`` and ``script`` functions get: a view of the scheduler, and ways to act on it.

Built to be a stand-in for the context of SGLang's own scripted runtime, whose queries it uses.
"""

from typing import Any

from tests.harness.scenario import BatchRecord, Output, Req


class Control:
    """One per scenario. Everything that acts takes effect in the iteration that is about to run."""

    def __init__(self, scheduler, driver):
        self.scheduler = scheduler
        self.data: dict[str, Any] = {}  # free for the test, kept from step to step
        self._scheduler_hook = driver
        self._seen_rids: set[str] = set()

    # ---- what there is to see
    @property
    def step(self) -> int:
        """The number of the loop iteration that is about to run, from 0."""
        return self._scheduler_hook.index

    @property
    def outputs(self) -> dict[str, Output]:
        """Everything sent so far; with overlap scheduling one iteration behind what has run."""
        return self._scheduler_hook.outputs

    @property
    def batches(self) -> list[BatchRecord]:
        return self._scheduler_hook.batches

    @property
    def retractions(self) -> list[tuple[int, str]]:
        return self._scheduler_hook.retractions

    def req(self, rid: str):
        """SGLang's live Req of that rid, or None when it is not (or no longer) scheduled."""
        return self._query("find_req_by_rid", rid)

    def active(self) -> list:
        """SGLang's Req objects that wait, prefill or decode, in no order."""
        return self._query("list_active_reqs")

    def status(self, rid: str) -> str:
        """unknown, waiting, running or finished"""
        return self._query("status", rid)

    def chunks_done(self, rid: str) -> int:
        """How many prefill batches have taken a part of this request's prompt."""
        return sum(rid in batch.extend_rids for batch in self.batches)

    def remaining_prompt_tokens(self, rid: str) -> int:
        return self._query("remaining_prompt_tokens", rid)

    # ---- what there is to do
    def record(self, value: Any) -> None:
        """Append a picklable value to ``Result.records``."""
        self._scheduler_hook.records.append(value)

    def submit(self, req: Req) -> None:
        """Add a request; its ``arrive`` may be this step or a later one."""
        self._scheduler_hook.submit(req)

    def abort(self, rid: str) -> None:
        self._send("AbortReq", rid=rid)

    def abort_all(self) -> None:
        self._send("AbortReq", abort_all=True)

    def flush(self) -> None:
        """Ask for an empty prefix cache; the answer is in ``Result.replies``."""
        self._send("FlushCacheReqInput")

    def pause(self, mode: str) -> None:
        """``retract``: every request goes back to the queue. ``in_place``: all stay where they are."""
        self._send("PauseGenerationReqInput", mode=mode)

    def resume(self) -> None:
        self._send("ContinueGenerationReqInput", torch_empty_cache=False)

    def force_retract(self) -> None:
        """As if memory ran out in this iteration's decode batch, through SGLang's own test switch.

        One request goes back to the queue; SGLang never retracts the only one, and nothing happens
        when this iteration prefills. ``retractions`` says what came of it.
        """
        self._scheduler_hook.force_retract()

    def send(self, message) -> None:
        """Any struct of sglang.srt.managers.io_struct."""
        self._scheduler_hook.inbox.put(message)

    def _send(self, name, **fields):
        from sglang.srt.managers import io_struct

        self.send(getattr(io_struct, name)(**fields))

    def _query(self, name, *args):
        from sglang.test.scripted_runtime.context import queries

        return getattr(queries, name)(self, *args)

    # what SGLang's queries read off the hook
    @property
    def _batch_log(self):
        return self._scheduler_hook.batches
