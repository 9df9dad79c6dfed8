"""An engine's metrics page, and a server that shows it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def page(
    rounds: int, drafted: int, accepted: list[int], generated: int = 0, engine: int = 0
) -> str:
    """As vLLM 0.32 writes it, with its neighbours."""
    labels = f'engine="{engine}",model_name="/models/a {{b}} \\"c\\""'
    lines = [
        "# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.",
        "# TYPE vllm:spec_decode_num_drafts_total counter",
        f"vllm:spec_decode_num_drafts_total{{{labels}}} {rounds:.1f}",
        f"vllm:spec_decode_num_drafts_created{{{labels}}} 1.7645e+09",
        f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} {drafted:.1f}",
        f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} {sum(accepted):.1f}",
        *(
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{i}"}} {a:.1f}'
            for i, a in enumerate(accepted)
        ),
        f'vllm:spec_decode_num_accepted_tokens_per_pos_created{{{labels},position="0"}} 1.7e+09',
        f"vllm:generation_tokens_total{{{labels}}} {generated:.1f}",
        f"vllm:num_requests_running{{{labels}}} 0.0",
        "process_resident_memory_bytes 1.5e+09",
    ]
    return "\n".join(lines) + "\n"


@contextmanager
def serving(answer: Callable[[str, bytes], str]) -> Iterator[str]:
    """A server on loopback that answers every request by `answer(path, body)`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(b"")

        def do_POST(self) -> None:
            self.reply(self.rfile.read(int(self.headers["Content-Length"])))

        def reply(self, body: bytes) -> None:
            text = answer(self.path, body).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
