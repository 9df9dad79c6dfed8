"""A server of a tiny verifier that has a generation_config: whatever a request leaves out of the
law is as that says. Chats, and completions of ids; plain and streamed."""

import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from headstart.data.rows.template import template_ids
from headstart.models.proposal.sampling import Sampling, draw
from headstart.models.verifier.verifier import Verifier

OFF = {
    "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}  # fmt: skip
CONFIG = {
    "temperature": 0.9, "top_p": 0.6, "top_k": 2, "min_p": 0.2, "repetition_penalty": 1.7,
    "presence_penalty": 1.5, "frequency_penalty": 1.5,
}  # fmt: skip


@torch.no_grad()
def written(verifier: Verifier, prompt: list[int], law: dict[str, float], count: int) -> list[int]:
    """At most `count` tokens, decoded under the law without a cache."""
    answer: list[int] = []
    for _ in range(count):
        ids = torch.tensor([prompt + answer])
        logits = verifier.logits(verifier.states(ids).last_hidden[0, -1]).float()
        for token in set(prompt + answer):
            up = logits[token] > 0
            logits[token] *= law["repetition_penalty"] ** (-1 if up else 1)
        for token, times in Counter(answer).items():
            logits[token] -= law["presence_penalty"] + law["frequency_penalty"] * times
        likely = logits.softmax(-1)
        logits[likely < law["min_p"] * likely.max()] = -torch.inf
        probs = Sampling(law["temperature"], max(0, law["top_k"]), law["top_p"]).probs(logits)
        answer.append(int(draw(probs, torch.rand(()))))
        if answer[-1] in verifier.terminator_ids:
            break
    return answer


class LawServer(ThreadingHTTPServer):
    """`laws` and `answers` hold, for each request, what ruled and what was written.

    Args:
        refuses: fields that it does not know; it names one at a time.
    """

    daemon_threads = True

    def __init__(self, verifier: Verifier, refuses: tuple[str, ...] = ()):
        super().__init__(("127.0.0.1", 0), Handler)
        self.verifier, self.refuses = verifier, refuses
        self.laws: list[dict[str, float]] = []
        self.answers: list[tuple[list[int], list[int]]] = []
        self.refusals = 0
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: LawServer

    def log_message(self, *_: Any) -> None:
        pass

    def send(self, code: int, body: str) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self) -> None:
        known = self.path == "/v1/models"
        self.send(200 if known else 404, json.dumps({"data": [{"id": "tiny"}]} if known else {}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.answer(self.server, body)

    def answer(self, server: LawServer, body: dict[str, Any]) -> None:
        unknown = next((name for name in server.refuses if name in body), None)
        if unknown is not None:
            server.refusals += 1
            said = f"Unrecognized request argument supplied: {unknown}"
            self.send(400, json.dumps({"error": {"message": said}}))
            return
        law = {name: body.get(name, default) for name, default in CONFIG.items()}
        verifier = server.verifier
        prompt = body.get("prompt") or template_ids(verifier.tokenizer, body["messages"])
        ids = written(verifier, prompt, law, body["max_tokens"])
        server.laws.append(law)
        server.answers.append((prompt, ids))
        end = ids[-1] in verifier.terminator_ids
        text = verifier.tokenizer.decode(ids[:-1] if end else ids)
        reason = "stop" if end else "length"
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        choice: dict[str, Any] = {"index": 0, "token_ids": ids}
        if not body.get("stream"):
            choice |= {"message": {"role": "assistant", "content": text}, "finish_reason": reason}
            found = {"choices": [choice], "prompt_token_ids": prompt, "usage": usage}
            self.send(200, json.dumps(found))
            return
        events = [{"choices": [choice | {"delta": {"content": text}}]}]
        if "stream_options" in body:
            events.append({"choices": [], "usage": usage})
        self.send(200, "".join(f"data: {json.dumps(e)}\n\n" for e in events) + "data: [DONE]\n\n")
