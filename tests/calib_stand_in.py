"""Takes the place of a server in observe mode: makes up keys and shows them to the real observer.

Also reads what an observer wrote.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import torch

from tangram_sglang.calib.observations import profile_key, read_request, windows_of
from tangram_sglang.calib.observer import Observer
from tangram_sglang.plan.shape import LayerShape, ModelShape
from tangram_sglang.plan.window import WindowRule

SHAPE = ModelShape(tuple(LayerShape(i, 4, 2, 16, None, 0.25) for i in range(2)))
RULE = WindowRule(64, 256, 16, 4)
FREQ = torch.logspace(0, -3, 8, dtype=torch.float64)
CHUNK = 100


def read_shares(out: Path, profile: str, scope: str, retention: float) -> np.ndarray:
    """Shares of every window that was profiled, [N, H], in the order they were seen."""
    row = read_request(out).retentions.index(retention)
    return np.stack([x[row] for x in windows_of(out, profile_key(profile, scope)).values()])


def projections():
    generator = torch.Generator().manual_seed(9)
    return {layer: torch.randn(24, 64, generator=generator) for layer in range(2)}


class StandIn:
    """Head h of layer l gets the more by keydiff the higher h; what is shown follows from the prompt."""

    command_line = "a stand-in"
    forgets = False

    def __init__(self, arguments, environment, log: Path):
        log.write_text("the log\n")
        self.arguments, self.environment = arguments, environment
        StandIn.last = self
        self.prompts = []
        self._observer = Observer(
            SHAPE,
            dict.fromkeys(range(2), FREQ),
            RULE,
            Path(environment["TANGRAM_OBSERVE"]),
            projections=projections,
        )

    def __enter__(self):
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                try:
                    owner.answer(body)
                    self.send_response(200)
                except ValueError:
                    self.send_response(400)
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *args):
                pass

        self._http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *exc_info):
        self._http.shutdown()
        self._http.server_close()

    def wait_until_ready(self):
        pass

    def check_alive(self):
        pass

    def answer(self, body):
        prompt = body["input_ids"]
        assert body["sampling_params"]["max_new_tokens"] == 1
        self.prompts.append(prompt)
        generator = torch.Generator().manual_seed(sum(prompt))
        # wider keys in higher heads: keydiff spreads more there
        width = torch.tensor([0.3, 1.0])[:, None]
        n = len(prompt)
        q = torch.randn(2, n, 4, 16, generator=generator)
        k = 1 + width * torch.randn(2, n, 2, 16, generator=generator)
        v = torch.randn(2, n, 2, 16, generator=generator)
        for first in range(0, n, CHUNK):
            end = min(n, first + CHUNK)
            windows = range(RULE.sealed(first) if first else 0, RULE.sealed(end))
            for layer in range(2):
                span = slice(first, end)
                self._observer.queries(layer, q[layer, span], torch.arange(first, end))
                self._observer.context(layer, k[layer, span], v[layer, span])
                for j in windows[: len(windows) - self.forgets]:
                    mine = slice(j * 64, (j + 1) * 64)
                    self._observer.window(
                        layer,
                        j * 64,
                        k[layer, mine].transpose(0, 1),
                        v[layer, mine].transpose(0, 1),
                    )
