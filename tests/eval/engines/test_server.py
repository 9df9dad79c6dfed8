"""The command line of a vLLM of our own, and a server's start and end."""

import json
import os

import pytest
from fake_vllm import fake_engine

from headstart.eval.engines import server
from headstart.eval.engines.server import (
    command,
    complete,
    cpu_environment,
    executable,
    model_name,
    serving,
    shown,
)


def test_command_can_be_typed_as_it_is_shown():
    config = {"method": "ngram", "num_speculative_tokens": 2}
    words = command("some model", config, ["--dtype", "float32"])
    assert shown(words, {"A": "b c"}) == (
        "A='b c' vllm serve 'some model' --dtype float32 --speculative-config "
        '\'{"method": "ngram", "num_speculative_tokens": 2}\''
    )
    assert command("m", None, []) == ["vllm", "serve", "m"]


def test_cpu_build_gets_its_settings_and_the_callers_own_win(tmp_path, monkeypatch):
    program = executable(fake_engine(tmp_path / "cpu", ""))
    for name in ("LD_PRELOAD", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    found = cpu_environment(program)
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    assert found["LD_PRELOAD"] == str(tmp_path / "cpu" / "lib" / "libiomp5.so")
    assert found["VLLM_CPU_OMP_THREADS_BIND"] == cores
    assert "VLLM_CPU_KVCACHE_SPACE" not in found
    assert cpu_environment(str(tmp_path / "gpu" / "bin" / "vllm")) == {}


def test_missing_engine_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"no vllm in .*`make engine`"):
        executable(str(tmp_path / "nowhere"))


SERVER = """
import http.server, json, sys
words = sys.argv[1:]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        text = json.dumps({"data": [{"id": " ".join(words)}]}).encode()
        self.send_response(200); self.end_headers(); self.wfile.write(text)
    def log_message(self, *_): pass
port = int(words[words.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def test_server_runs_as_long_as_its_block(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "cpu_environment", lambda program: {})
    engine = fake_engine(tmp_path / "engine", SERVER)
    config = {"method": "ngram"}
    with serving("model", config, engine, ["--dtype", "float32"], tmp_path / "log") as address:
        words = model_name(address)
        assert (
            words.startswith("serve model --host 127.0.0.1 --port") and "--dtype float32" in words
        )
        assert json.dumps(config) in words
    with pytest.raises(ValueError, match="does not answer as vLLM does"):
        model_name(address)


def test_server_that_ends_at_its_start_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "cpu_environment", lambda program: {})
    engine = fake_engine(tmp_path / "engine", "print('all well'); raise KeyError('no such thing')")
    with (
        pytest.raises(ValueError, match=r"ended at its start .KeyError: 'no such thing'") as error,
        serving("model", None, engine, [], tmp_path / "log"),
    ):
        pass
    assert "\n" not in str(error.value)


def test_server_that_goes_away_is_named():
    with pytest.raises(ValueError, match=r"server .http://127.0.0.1:9. did not complete a prompt"):
        complete("http://127.0.0.1:9", "m", [1], 2)
