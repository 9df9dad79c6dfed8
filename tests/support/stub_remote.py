"""A server of OpenAI's chat API without a model, that can be told to misbehave and be killed.

Its answer to a prompt is `answer(prompt)`: a few of the tiny tokenizer's words, and the terminator.
"""

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import tiny

from headstart.data.rows.template import template_ids

TOKENIZER = tiny.tokenizer()
END = TOKENIZER.eos_token_id
Trouble = Callable[[str, int], "str | None"]
"""A prompt's last text, and which try it is (from 1) -> what goes wrong."""


def answer(prompt: list[int]) -> list[int]:
    """Between two and five words, then the terminator."""
    words = [7 + (sum(prompt) * (place + 3)) % 57 for place in range(2 + sum(prompt) % 4)]
    return [*words, END]


class Stub:
    """One server; `start` after `kill` brings it back at the same port.

    Args:
        trouble: one of "500", "429", "400", "404", "stall" (no reply at all), "slow", "cut",
            "garbage", "abort", "twice" (the reply is sent twice), "other" (the reply to another
            prompt); None: nothing.
        die_after: the server is killed after so many replies each, for a moment.
        knows_ids: it takes `return_token_ids`; None: it refuses such a field.
    """

    def __init__(
        self,
        trouble: Trouble = lambda text, attempt: None,
        die_after: tuple[int, ...] = (),
        knows_ids: bool | None = True,
        models: tuple[str, ...] = ("tiny",),
    ):
        self.trouble, self.die_after = trouble, die_after
        self.knows_ids, self.models = knows_ids, models
        self.tries: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.replies = self.kills = self.most_at_once = self.at_once = 0
        self.when_replied: Callable[[int], None] = lambda count: None
        self.lock = threading.Lock()
        self.connections: set[socket.socket] = set()
        self.killed = threading.Event()
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"  # connections are kept

            def setup(self) -> None:
                super().setup()
                with stub.lock:
                    stub.connections.add(self.connection)

            def handle(self) -> None:
                try:
                    super().handle()
                except OSError:  # killed, or nobody waits any more
                    pass
                finally:
                    with stub.lock:
                        stub.connections.discard(self.connection)

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                models = [{"id": name, "max_model_len": 200} for name in stub.models]
                self.send(200, {"data": models})

            def do_POST(self) -> None:
                stub.handle(self, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def send(self, status: int, value: Any, **headers: str) -> bytes:
                data = value if isinstance(value, bytes) else json.dumps(value).encode()
                self.send_response(status)
                for name, text in headers.items():
                    self.send_header(name.replace("_", "-"), text)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
                return data

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, *_: Any) -> None:
                pass

        self.server = Server(("127.0.0.1", self.port), Handler)
        self.port = self.server.server_address[1]
        self.killed.clear()
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def kill(self) -> None:
        """Nobody listens, and every connection breaks off where it is."""
        self.server.shutdown()
        self.server.server_close()
        self.killed.set()
        with self.lock:
            connections = list(self.connections)
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def die(self, seconds: float = 0.3) -> None:
        self.kill()
        time.sleep(seconds)
        self.start()

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        kwargs = body.get("chat_template_kwargs")
        prompt = template_ids(TOKENIZER, body["messages"], body.get("tools"), kwargs)
        ids = answer(prompt)
        cut = len(ids) > body["max_tokens"]
        ids = ids[: body["max_tokens"]]
        message = {"role": "assistant", "content": TOKENIZER.decode(ids if cut else ids[:-1])}
        choice = {"index": 0, "message": message, "finish_reason": "length" if cut else "stop"}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        made = {"choices": [choice], "usage": usage}
        if self.knows_ids and body.get("return_token_ids"):
            choice["token_ids"] = ids
            made["prompt_token_ids"] = prompt
        return made

    def handle(self, handler: Any, body: dict[str, Any]) -> None:
        text = body["messages"][-1]["content"]
        with self.lock:
            self.tries[text] += 1
            attempt = self.tries[text]
            self.bodies.append(body)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            self.misbehave(handler, body, self.trouble(text, attempt))
        finally:
            with self.lock:
                self.at_once -= 1

    def misbehave(self, handler: Any, body: dict[str, Any], trouble: str | None) -> None:
        if self.knows_ids is None and "return_token_ids" in body:
            handler.send(400, {"error": {"message": "unknown field return_token_ids"}})
        elif trouble in ("500", "400", "404"):
            handler.send(int(trouble), {"error": {"message": "so it is"}})
        elif trouble == "429":
            handler.send(429, {"error": {"message": "too many"}}, Retry_After="0")
        elif trouble == "garbage":
            handler.send(200, b"<html>")
        elif trouble == "cut":
            handler.send_response(200)
            handler.send_header("Content-Length", "1000")
            handler.end_headers()
            handler.wfile.write(b'{"choices": [')
            handler.wfile.flush()
            handler.connection.shutdown(socket.SHUT_RDWR)
        else:
            if trouble == "stall":
                self.killed.wait()  # whoever asked has long gone
                return
            if trouble == "slow":
                time.sleep(0.1)
            made = self.reply(body)
            if trouble == "abort":
                made["choices"][0]["finish_reason"] = "abort"
            if trouble == "other":
                other = {"role": "user", "content": "w1 w1 w1 w1 w1"}
                made = self.reply(body | {"messages": [other]})
            data = handler.send(200, made)
            if trouble == "twice":
                head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(data)}\r\n\r\n".encode()
                handler.wfile.write(head + data)
            with self.lock:
                self.replies += 1
                count = self.replies
            self.when_replied(count)
            if count in self.die_after:
                self.kills += 1
                threading.Thread(target=self.die, daemon=True).start()
