"""Drives SGLang's event loop: hands over requests, calls the test, records, and stops the loop.

Sits in the scheduler's seam for SGLang's own scripted runtime: the loop calls ``step`` before it
reads requests and ``on_run_batch`` before each forward pass. The loop itself is never replaced.
"""

import dataclasses
from collections.abc import Callable

from tests.harness.control import Control
from tests.harness.scenario import BatchRecord, Output, Req
from tests.harness.wire import Inbox, Outbox, absorb, tokenized


class Driver:
    def __init__(
        self,
        scheduler,
        requests: list[Req],
        on_step: Callable | None,
        script: Callable | None,
        max_steps: int,
        max_stall: int,
    ):
        self.scheduler = scheduler
        self.index = -1
        self.inbox = Inbox()
        self.outputs: dict[str, Output] = {}
        self.batches: list[BatchRecord] = []
        self.records: list = []
        self.replies: list = []
        self.retractions: list[tuple[int, str]] = []
        self._batch_log = self.batches  # the name SGLang's scripted-runtime queries look for
        self._retractions_seen: dict[str, int] = {}
        self._switches = None
        self._pending: list[Req] = []
        self._last_progress = 0
        self._max_steps, self._max_stall = max_steps, max_stall
        self._stopping = False
        self._control = Control(scheduler, self)
        self._on_step = on_step
        self._script = script(self._control) if script else None
        for req in requests:
            self.submit(req)
        self._install()

    def _install(self):
        s = self.scheduler
        s.scripted_scheduler_hook = self
        s.request_receiver = dataclasses.replace(
            s.request_receiver, recv_from_tokenizer=self.inbox, scripted_scheduler_hook=self
        )
        outbox = Outbox(self._deliver)
        s.ipc_channels.send_to_tokenizer.socket = outbox
        s.ipc_channels.send_to_detokenizer.socket = outbox

    # ---- called by SGLang
    def step(self) -> None:
        self.index += 1
        self._restore_switches()
        self._note_retractions()
        self._check_limits()
        if self._on_step:
            self._on_step(self._control)
        if self._script and next(self._script, self) is self:
            self._script = None
        self._hand_over()
        if not self._stopping and self._is_done():
            from sglang.srt.managers.io_struct import ShutdownReq

            self._stopping = True
            self.inbox.put(ShutdownReq())

    def on_run_batch(self, batch) -> None:
        self._last_progress = self.index
        mode = batch.forward_mode
        one = [1] * len(batch.reqs)
        decode = mode.is_decode()
        self.batches.append(
            BatchRecord(
                step=self.index,
                mode=mode.name.lower(),
                rids=tuple(r.rid for r in batch.reqs),
                prefix_lens=tuple(
                    (batch.seq_lens_cpu - 1).tolist() if decode else batch.prefix_lens
                ),
                new_tokens=tuple(one if decode else batch.extend_lens),
            )
        )

    # ---- called by Control
    def submit(self, req: Req) -> None:
        if not req.rid:
            req = dataclasses.replace(req, rid=f"r{len(self.outputs)}-")
        for other in self.outputs:
            if other.startswith(req.rid) or req.rid.startswith(other):
                raise ValueError(f"rids {other!r} and {req.rid!r}: one is a prefix of the other")
        if req.continues and not req.after:
            raise ValueError(f"request {req.rid!r} continues another, `after` must name it")
        self.outputs[req.rid] = Output(req.rid, list(req.input_ids))
        self._pending.append(req)

    def force_retract(self) -> None:
        from sglang.srt.managers import scheduler as module

        self._switches = (module.TEST_RETRACT, module.TEST_RETRACT_INTERVAL)
        module.TEST_RETRACT, module.TEST_RETRACT_INTERVAL = True, 1

    # ---- a step's parts, in order
    def _restore_switches(self):
        if self._switches is not None:
            from sglang.srt.managers import scheduler as module

            module.TEST_RETRACT, module.TEST_RETRACT_INTERVAL = self._switches
            self._switches = None

    def _note_retractions(self):
        # a retracted request is in the queue at the next step, whatever becomes of it then
        for req in self.scheduler.waiting_queue:
            seen = self._retractions_seen.get(req.rid, 0)
            if req.retraction_count > seen:
                self._retractions_seen[req.rid] = req.retraction_count
                self.retractions.append((self.index - 1, req.rid))

    def _check_limits(self):
        open_rids = [rid for rid, out in self.outputs.items() if not out.finished]
        waits_for_step = any(req.arrive > self.index for req in self._pending)
        if waits_for_step or self._stopping:
            self._last_progress = self.index
        if self.index >= self._max_steps or self.index - self._last_progress > self._max_stall:
            s = self.scheduler
            raise RuntimeError(
                f"no end in sight at loop iteration {self.index} (last batch ran at "
                f"{self._last_progress}); unfinished requests {open_rids}, "
                f"queued {[r.rid for r in s.waiting_queue]}, "
                f"running {[r.rid for r in s.running_batch.reqs]}, "
                f"available tokens {s.token_to_kv_pool_allocator.available_size()}, "
                f"script {'still running' if self._script else 'over'}"
            )

    def _hand_over(self):
        still = []
        for req in self._pending:
            before = self.outputs[req.after] if req.after else None
            if req.arrive > self.index or (before is not None and not before.finished):
                still.append(req)
                continue
            prompt = list(req.input_ids)
            if req.continues:
                prompt = [*before.prompt_ids, *before.output_ids, *prompt]
            self.outputs[req.rid].prompt_ids = prompt
            self.inbox.put(tokenized(req, prompt, self.scheduler.model_config.vocab_size))
        self._pending = still

    def _is_done(self) -> bool:
        return (
            not self._script
            and not self._pending
            and all(out.finished for out in self.outputs.values())
            and self.scheduler.is_fully_idle()
        )

    def _deliver(self, message) -> None:
        from sglang.srt.managers.io_struct import AbortReq, BatchTokenIDOutput

        if isinstance(message, BatchTokenIDOutput):
            for i, rid in enumerate(message.rids):
                absorb(self.outputs[rid], message, i, self.index)
        elif isinstance(message, AbortReq):
            out = self.outputs[message.rid]
            out.finish_reason = dict(message.finished_reason or {"type": "abort"})
            out.finish_step = self.index
        else:
            self.replies.append(message)
