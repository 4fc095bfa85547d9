"""A real SGLang engine that answers what a query saw: final hidden states behind a prompt.

Hidden states and not logits: SGLang returns them for every prompt token, they are 85 times smaller
for SmolLM2, and times the output embedding they give the exact distribution over all tokens.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tangram_sglang.cache.trie import WindowTrie
from tangram_sglang.cli.server import cpu_arguments, cpu_environment


@dataclass(frozen=True, slots=True)
class Seen:
    """One prompt, run to its end.

    Attributes:
        cached: tokens that came from the prefix cache.
        hidden: final hidden states of the tokens from ``cached`` on, [tokens - cached, D] fp32.
        logprobs: SGLang's own log-probability of each token behind ``start``, given all before it.
        start: first token whose log-probabilities SGLang gave.
        output_ids: what greedy decoding said next.
    """

    cached: int
    hidden: torch.Tensor
    logprobs: tuple[float, ...]
    start: int
    output_ids: tuple[int, ...]

    def queries(self, begin: int, end: int) -> torch.Tensor:
        """Hidden states of the tokens at positions [begin, end)."""
        if begin < self.cached:
            raise ValueError(f"token {begin} was not computed: {self.cached} tokens were cached")
        return self.hidden[begin - self.cached : end - self.cached]


class BranchEngine:
    """Context manager around ``sglang.Engine`` on the CPU, one request at a time.

    Args:
        model: model folder.
        settings: ``TANGRAM_*``.
        go_back: False lets a branch start right behind its last sealed window, without the raw
            tokens before it; the product never does that.
    """

    def __init__(self, model: Path, settings: Mapping[str, str], *, go_back: bool = True):
        os.environ.update(cpu_environment(settings))
        from sglang.srt.entrypoints.engine import Engine
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import prepare_server_args

        class Patched(Engine):
            run_scheduler_process_func = staticmethod(run_scheduler_without_going_back)

        load_plugins()
        # a process has one registry of metrics, and runs several engines one after another
        unwanted = ("--enable-metrics", "--enable-cache-report")
        arguments = [flag for flag in cpu_arguments(model, "tangram") if flag not in unwanted]
        arguments += ["--enable-return-hidden-states", "--log-level", "error"]
        # whole prompts in one chunk: no raw tail is published on the way
        arguments += ["--chunked-prefill-size", "8192", "--max-prefill-tokens", "8192"]
        self._engine = (Engine if go_back else Patched)(server_args=prepare_server_args(arguments))

    def __enter__(self) -> "BranchEngine":
        return self

    def __exit__(self, *exc_info) -> None:
        self._engine.shutdown()

    def forget(self) -> None:
        """Empty the prefix cache."""
        self._engine.flush_cache()

    def say(self, ids: Sequence[int], tokens: int = 1) -> None:
        """Run a prompt and generate ``tokens`` tokens, for what it leaves in the cache."""
        self._engine.generate(input_ids=list(ids), sampling_params=_greedy(tokens))

    def see(self, ids: Sequence[int], start: int) -> Seen:
        """Run a prompt that may reuse at most the tokens before ``start``."""
        answer = self._engine.generate(
            input_ids=list(ids),
            sampling_params=_greedy(1),
            return_hidden_states=True,
            return_logprob=True,
            logprob_start_len=start,
        )
        meta = answer["meta_info"]
        # the first entry stands for the token at `start`, which nothing computed predicts
        logprobs = [entry[0] for entry in meta["input_token_logprobs"][1:]]
        hidden = torch.tensor(meta["hidden_states"][0])
        return Seen(
            meta["cached_tokens"], hidden, tuple(logprobs), start, tuple(answer["output_ids"])
        )


def run_scheduler_without_going_back(*args, **kwargs):
    """SGLang's scheduler process with a trie that takes every sealed window it finds."""
    original = WindowTrie.__init__

    def init(self, rule, *rest):
        original(self, replace(rule, recent=0), *rest)

    WindowTrie.__init__ = init
    from sglang.srt.managers.scheduler import run_scheduler_process

    return run_scheduler_process(*args, **kwargs)


def _greedy(tokens: int) -> dict:
    return {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
