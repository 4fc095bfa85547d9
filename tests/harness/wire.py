"""The two socket ends that the harness replaces. Messages pass SGLang's own encoder both ways."""

import pickle
from array import array
from collections import deque

import zmq

from tests.harness.scenario import Output, Req


class Inbox:
    """Stands for the socket from the tokenizer process: ``recv`` never blocks."""

    def __init__(self):
        self._waiting = deque()

    def put(self, message) -> None:
        from sglang.srt.managers import io_struct

        # encoded now: a message is a snapshot, and one that the wire refuses fails here
        encode = pickle.dumps if io_struct._USE_PICKLE_IPC else io_struct.msgpack_encode
        self._waiting.append(encode(message))

    def recv(self, flags=0) -> bytes:
        if not self._waiting:
            raise zmq.ZMQError(zmq.EAGAIN)
        return self._waiting.popleft()

    def recv_pyobj(self, flags=0):
        return pickle.loads(self.recv(flags))


class Outbox:
    """Stands for the sockets to the tokenizer and detokenizer processes."""

    def __init__(self, deliver):
        self._deliver = deliver

    def send(self, data, flags=0) -> None:
        from sglang.srt.managers.io_struct import msgpack_decode

        self._deliver(msgpack_decode(data))

    def send_pyobj(self, message, flags=0, protocol=None) -> None:
        self._deliver(pickle.loads(pickle.dumps(message)))


def tokenized(req: Req, prompt_ids: list[int], vocab_size: int):
    """The message TokenizerManager would send for this request; streams, so every token is dated."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling = SamplingParams(
        **{
            "temperature": 0.0,
            "max_new_tokens": req.max_new_tokens,
            "ignore_eos": req.ignore_eos,
            "stop_token_ids": list(req.stop_token_ids) or None,
            **req.sampling,
        }
    )
    sampling.normalize(None)
    sampling.verify(vocab_size)
    values = {
        "rid": req.rid,
        "input_text": None,
        "input_ids": array("q", prompt_ids),
        "input_embeds": None,
        "mm_inputs": None,
        "token_type_ids": None,
        "sampling_params": sampling,
        "return_logprob": req.logprobs,
        "logprob_start_len": req.prompt_logprobs_from,
        "top_logprobs_num": req.top_logprobs,
        "token_ids_logprob": None,
        "stream": True,
        **req.fields,
    }
    return TokenizedGenerateReqInput(**values)


def absorb(out: Output, batch, i: int, step: int) -> None:
    """Add entry ``i`` of a BatchTokenIDOutput to what this request has sent so far."""
    out.output_ids += batch.output_ids[i]
    out.cached_tokens = batch.cached_tokens[i]
    out.retractions = batch.retraction_counts[i]
    if batch.finished_reasons[i] is not None:
        out.finish_reason, out.finish_step = dict(batch.finished_reasons[i]), step
    if batch.output_token_logprobs_val:
        out.logprobs += batch.output_token_logprobs_val[i] or []
        out.prompt_logprobs += batch.input_token_logprobs_val[i] or []
        tops = zip(batch.output_top_logprobs_idx[i], batch.output_top_logprobs_val[i], strict=True)
        out.top_logprobs += [dict(zip(ids, vals, strict=True)) for ids, vals in tops if ids]
