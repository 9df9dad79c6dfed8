"""What is told of a verifier without its weights is true of it with them."""

from pathlib import Path

import pytest
import tiny

from headstart.models.verifier.outline import Outline


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_outline_is_that_of_the_loaded_verifier(family: str, tmp_path: Path) -> None:
    verifier = tiny.verifier(family)
    folder = tiny.save(verifier, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    outline = Outline.read(folder)
    assert outline.name == folder
    for name in ("num_layers", "hidden_size", "vocab_size", "context_length"):
        assert getattr(outline, name) == getattr(verifier, name), name


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, ". Pass embedded/smollm2-135m, a local folder, or a Hub name"),
        ("{", "cannot be loaded: "),
        ('{"model_type": "resnet"}', "cannot be loaded: "),
    ],
)
def test_what_is_no_verifier_is_named_in_one_line(
    tmp_path: Path, config: str | None, said: str
) -> None:
    folder = tmp_path / "verifier"
    if config is not None:
        folder.mkdir()
        (folder / "config.json").write_text(config)
    with pytest.raises(ValueError, match=rf"^verifier '{folder}'") as caught:
        Outline.read(str(folder))
    assert said in str(caught.value) and "\n" not in str(caught.value)
