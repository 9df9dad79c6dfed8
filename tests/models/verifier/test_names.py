"""What a name leads to is decided in one place, for verifiers, adapters, drafters and engines."""

from pathlib import Path

import pytest

from headstart.eval.engines.commands import speculative_config
from headstart.eval.engines.kinds import verifier_of
from headstart.models.loading import is_checkpoint
from headstart.models.verifier import adapter
from headstart.models.verifier.names import check_there, is_embedded, is_path
from headstart.models.verifier.outline import locate

HUB = ["gpt2", "meta-llama/Llama-3.1-8B"]
LOST = ["/no/such", "./no", "~/no", "a/b/c", "outputs/no"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs" / "model").mkdir(parents=True)
    (tmp_path / "outputs" / "file").touch()
    return tmp_path


@pytest.mark.parametrize("name", HUB)
def test_a_name_of_the_hub_is_no_path(name: str) -> None:
    assert not is_path(name)
    check_there("verifier", name)
    assert not is_checkpoint(name)


def test_an_embedded_name_is_neither() -> None:
    assert is_embedded("embedded/smollm2-135m")
    assert not is_path("embedded/smollm2-135m")


@pytest.mark.parametrize("name", LOST)
def test_a_path_that_leads_nowhere_is_named_alike_everywhere(name: str) -> None:
    assert is_path(name)
    assert is_checkpoint(name)  # one that is missing, not a model of the Hub
    for field, ask in (
        ("verifier", lambda: locate(name)),
        ("adapter", lambda: adapter.merge(None, name)),
        ("verifier", lambda: verifier_of(name, "prompt-lookup")),
    ):
        with pytest.raises(ValueError, match=rf"^{field} '{name}': no such folder"):
            ask()
    with pytest.raises(ValueError, match=f"^drafter '{name}'.*no such folder"):
        speculative_config(name, 2)


def test_a_folder_and_a_file() -> None:
    check_there("verifier", "outputs/model")
    with pytest.raises(ValueError, match="verifier 'outputs/file': a file, not a folder"):
        check_there("verifier", "outputs/file")
    with pytest.raises(ValueError, match="no such folder in 'outputs'"):
        check_there("verifier", "outputs/no")
