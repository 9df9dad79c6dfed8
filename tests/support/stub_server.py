"""A server with OpenAI's interface that streams canned answers."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CHUNKS, TOKENS = 4, 10


class Stub(ThreadingHTTPServer):
    """Streams `CHUNKS` chunks of `TOKENS` tokens; counts rounds as a drafting server does."""

    daemon_threads = True

    def __init__(self, drafts: int = 0, faults: str = ""):
        super().__init__(("127.0.0.1", 0), Handler)
        self.drafts, self.faults = drafts, faults
        self.requests: list[dict[str, Any]] = []
        self.busy = self.most_busy = 0
        self.lock = threading.Lock()
        self.together: threading.Barrier | None = None  # answer only once so many have asked
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, *_: Any) -> None:
        """A client that goes away is what some tests are about."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def metrics(self) -> str:
        """Each answer: 4 rounds, 3 drafts each at K = 3; accepted 3, 2 and 1 by position."""
        n = len(self.requests) if self.drafts else 0
        name, labels = "vllm:spec_decode_num", 'engine="0",model_name="m"'
        lines = [
            "# HELP vllm:spec_decode_num_drafts_total Number of drafts.",
            f"{name}_drafts_total{{{labels}}} {4.0 * n}",
            f"{name}_draft_tokens_total{{{labels}}} {12.0 * n}",
            f"{name}_accepted_tokens_total{{{labels}}} {6.0 * n}",
            *(
                f'{name}_accepted_tokens_per_pos_total{{{labels},position="{i}"}} {(3.0 - i) * n}'
                for i in range(3)
            ),
            f"{name}_drafts_created{{{labels}}} 1.7e9",
            "vllm:num_requests_running 3.0",
        ]
        return "\n".join(lines) + "\n"


class Handler(BaseHTTPRequestHandler):
    server: Stub

    def log_message(self, *_: Any) -> None:
        pass

    def send(self, code: int, kind: str, body: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.send(200, "application/json", json.dumps({"data": [{"id": "the-model"}]}))
        elif self.path == "/metrics" and self.server.faults != "no metrics":
            self.send(200, "text/plain", self.server.metrics())
        else:
            self.send(404, "text/plain", "not here")

    def do_POST(self) -> None:
        stub = self.server
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with stub.lock:
            stub.requests.append(request)
            stub.busy += 1
            stub.most_busy = max(stub.most_busy, stub.busy)
        if stub.together:
            stub.together.wait(60)
        if stub.faults == "refuses":
            self.send(400, "application/json", '{"error": "no such\\nmodel"}')
        else:
            self.answer(stub)
        with stub.lock:
            stub.busy -= 1

    def answer(self, stub: Stub) -> None:
        self.send_response(200)
        self.end_headers()
        deltas = [{"role": "assistant", "content": ""}]
        deltas += [{"content": f"w{i} "} for i in range(CHUNKS - 1)] + [{"reasoning": "thus"}]
        for delta in deltas:
            self.event({"choices": [{"delta": delta}]})
            threading.Event().wait(0.002)
            if stub.faults == "breaks":
                self.event({"error": {"message": "out of memory"}})
        if stub.faults != "no usage":
            self.event({"choices": [], "usage": {"completion_tokens": TOKENS}})
        self.wfile.write(b": a comment\n\ndata: [DONE]\n\n")

    def event(self, content: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(content)}\n\n".encode())
        self.wfile.flush()
