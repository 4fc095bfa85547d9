"""BeamCoordinator.validate_and_init: a beam search request is refused, not the server ended.

Beams take rows that no request owns, which our rows do not know. It is asked for by a request, so no
server flag can refuse it.
"""

from tangram_sglang.patches.hook import Hook, selected


def _validate_and_init(original, self, req, recv_req):
    if selected():
        return "Beam search is not supported with --attention-backend tangram."
    return original(self, req, recv_req)


HOOK = Hook(
    "sglang.srt.beam_search.coordinator.BeamCoordinator.validate_and_init",
    ("req", "recv_req"),
    _validate_and_init,
    "beam width is a request's parameter",
)
