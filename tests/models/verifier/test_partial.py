"""A part of the verifier is the verifier, as far as it goes."""

from pathlib import Path

import pytest
import tiny
import torch

from headstart.models.verifier.partial import PartialVerifier
from headstart.models.verifier.verifier import Verifier


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("shards", [1, 3])
def test_part_embeds_and_projects_like_the_whole(tmp_path: Path, family: str, shards: int) -> None:
    made = tiny.verifier(family)
    size = sum(w.numel() * 4 for w in made.model.parameters()) // shards + 1
    made.model.save_pretrained(tmp_path, max_shard_size=size)
    made.tokenizer.save_pretrained(tmp_path)
    whole = Verifier.load(str(tmp_path))
    part = PartialVerifier.read(str(tmp_path), "float32", "cpu")
    ids = torch.randint(0, 64, (2, 5))
    hidden = torch.randn(2, 5, whole.hidden_size)
    assert torch.equal(part.embed(ids), whole.embed(ids))
    assert torch.equal(part.logits(hidden), whole.logits(hidden))
    assert part.terminator_ids == whole.terminator_ids
    assert part.fingerprint() == whole.fingerprint()
    halved = PartialVerifier.read(str(tmp_path), "bfloat16", "cpu")
    assert halved.fingerprint() == whole.fingerprint()
    pairs = zip(part.layers[-1].parameters(), whole.layers[-1].parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert all(weight.is_meta for layer in part.layers[:-1] for weight in layer.parameters())


def test_layers_that_are_not_read_tell_verifiers_apart(tmp_path: Path) -> None:
    made = tiny.verifier()
    made.layers[2].mlp.up_proj.weight.data[0, 0] += 1.0
    part = PartialVerifier.read(tiny.save(made, tmp_path), "float32", "cpu")
    assert part.fingerprint() == made.fingerprint() != tiny.verifier().fingerprint()


def test_model_that_cannot_be_read_in_part_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'nowhere/nothing' cannot be read in part: "):
        PartialVerifier.read("nowhere/nothing", "float32", "cpu")
    folder = Path(tiny.save(tiny.verifier(), tmp_path))
    (folder / "model.safetensors").write_bytes(b"half")
    with pytest.raises(ValueError, match="cannot be read in part: "):
        PartialVerifier.read(str(folder), "float32", "cpu")
