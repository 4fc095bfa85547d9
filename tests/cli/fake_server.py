"""A stand-in for `sglang.launch_server`, run as a process by the tests of the command line.

    python fake_server.py PORT [--die-at-request N] [--deaf] [--never-ready]

Answers like SGLang with the tangram backend, without a model: the answer to request N is "answer N",
each prompt has 1000 tokens more than the one before. It has a child process, as SGLang has.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

parser = argparse.ArgumentParser()
parser.add_argument("port", type=int)
parser.add_argument("--die-at-request", type=int, default=0)
parser.add_argument("--deaf", action="store_true", help="ignore SIGTERM")
parser.add_argument("--never-ready", action="store_true")
parser.add_argument("--hang", action="store_true", help="never answer a request")
options = parser.parse_args()

if options.deaf:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
# it inherits what SIGTERM does
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(f"child {child.pid}", flush=True)

requests = 0
# /metrics lags behind the answer, as it does in SGLang
counted = 0


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        path = self.path.rstrip("/")
        if path == "/health":
            self.send_response(503 if options.never_ready else 200)
            self.end_headers()
        elif path == "/metrics":
            names = ("requests", "kv_tokens", "kv_entries", "kv_bytes", "kv_bytes_full")
            # sum of 1..counted: request n held n times as much
            total = counted * (counted + 1) // 2
            values = (counted, 1000 * total, 9000 * total, 3_000_000 * total, 6_000_000 * total)
            lines = [
                f"# TYPE tangram:finished_{name}_total counter\n"
                f'tangram:finished_{name}_total{{model_name="m"}} {value}\n'
                for name, value in zip(names, values, strict=True)
            ]
            self.reply("".join(lines).encode(), "text/plain")
        elif path == "/v1/models":
            self.reply_json({"object": "list", "data": [{"id": "m", "object": "model"}]})
        else:
            self.reply_json({"model_path": "m"})

    def do_POST(self):
        global requests
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        requests += 1
        if options.hang:
            time.sleep(600)
        if requests == options.die_at_request:
            print("CUDA error: the dog ate the page table", flush=True)
            os._exit(7)
        usage = {"prompt_tokens": 1000 * requests, "completion_tokens": 5}
        if self.path == "/generate":
            meta = {**usage, "cached_tokens": 0, "e2e_latency": 0.5}
            self.reply_json({"text": f"answer {requests}", "meta_info": meta})
        else:
            assert body["temperature"] == 0
            message = {"role": "assistant", "content": f"answer {requests}"}
            details = {"cached_tokens": 16 * requests}
            usage |= {"total_tokens": 0, "prompt_tokens_details": details}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            self.reply_json({"id": "1", "object": "chat.completion", "created": 0, "model": "m",
                             "choices": [choice], "usage": usage})  # fmt: skip
        threading.Timer(0.2, count).start()

    def reply_json(self, content):
        self.reply(json.dumps(content).encode(), "application/json")

    def reply(self, content, kind):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass


def count():
    global counted
    counted += 1


ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()
