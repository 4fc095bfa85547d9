"""What a test hands to a scenario and what comes back. Knows neither SGLang nor processes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Req:
    """One request, in token ids.

    Given to SGLang at loop iteration ``arrive``, or, with ``after``, in the first iteration in which
    the request of that rid has finished. ``continues`` puts that request's prompt and output in
    front of ``input_ids``, which makes a conversation. A rid must not begin with another's: SGLang
    aborts by prefix. As in SGLang, ``ignore_eos`` ignores ``stop_token_ids`` too.
    """

    input_ids: list[int]
    max_new_tokens: int = 16
    rid: str = ""
    arrive: int = 0
    after: str = ""
    continues: bool = False
    ignore_eos: bool = True
    stop_token_ids: tuple[int, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs_from: int = -1  # first prompt position whose log-probabilities are wanted
    sampling: dict[str, Any] = field(default_factory=dict)  # more fields of SamplingParams
    fields: dict[str, Any] = field(default_factory=dict)  # more of TokenizedGenerateReqInput


@dataclass(slots=True)
class Output:
    """What SGLang sent for one request; a list per token has one entry per output token."""

    rid: str
    prompt_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    finish_reason: dict | None = None  # as in the API: {"type": "length" | "stop" | "abort", ...}
    finish_step: int | None = None
    cached_tokens: int = 0
    retractions: int = 0
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """One batch that ran: rids, prefix lengths and new tokens stand in the batch's order."""

    step: int
    mode: str  # "extend", "decode", "mixed", ...
    rids: tuple[str, ...]
    prefix_lens: tuple[int, ...]
    new_tokens: tuple[int, ...]

    @property
    def extend_rids(self) -> tuple[str, ...]:
        return self.rids if self.mode != "decode" else ()


@dataclass(slots=True)
class Result:
    """``collected``: what ``collect`` returned. ``records``: what ``Control.record`` was given."""

    outputs: dict[str, Output]
    collected: Any
    records: list[Any]
    batches: list[BatchRecord]
    retractions: list[tuple[int, str]]  # (loop iteration, rid), in order
    replies: list[Any]  # answers to control requests, as SGLang's own structs
    steps: int
    boot_s: float = 0.0  # arguments, model, pools, scheduler
    run_s: float = 0.0  # the event loop, on_step and collect included
    total_s: float = 0.0  # all of it, as the test waits for it
    log: str = ""

    def __getitem__(self, rid: str) -> Output:
        return self.outputs[rid]

    @property
    def tokens(self) -> dict[str, list[int]]:
        return {rid: out.output_ids for rid, out in self.outputs.items()}


@dataclass(slots=True)
class Scenario:
    """Everything the child needs; the functions are pickled by name, or as functools.partial."""

    name: str
    model_path: str
    requests: list[Req]
    server_args: dict[str, Any]
    on_step: Callable | None
    script: Callable | None
    collect: Callable | None
    max_steps: int
    max_stall: int
    idle_check: bool
    threads: int
    scratch: str
    gpu: bool


class ScenarioError(RuntimeError):
    """A scenario gave no result. ``log`` is everything the child wrote."""

    def __init__(self, message: str, log: str = ""):
        super().__init__(message)
        self.log = log


class ScenarioFailed(ScenarioError):
    """The child raised. ``stage``: functions, arguments, build, run, idle check, collect or result."""

    def __init__(self, message, log, stage, error_type, error):
        super().__init__(message, log)
        self.stage, self.error_type, self.error = stage, error_type, error


class ScenarioDied(ScenarioError):
    """The child ended without an answer: a signal, or os._exit."""


class ScenarioTimeout(ScenarioError):
    """The child was killed after ``timeout_s``; its stacks are in the message."""
