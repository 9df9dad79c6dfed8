"""A verifier with an adapter is another verifier, everywhere by its name."""

import json
from pathlib import Path

import peft
import pytest
import tiny
import torch
from runs import recipe, run, verifier  # noqa: F401

from headstart.data import regenerate
from headstart.eval.engines import kinds
from headstart.models import export
from headstart.models.loading import load_pair
from headstart.models.verifier.adapter import join, split
from headstart.models.verifier.verifier import Verifier


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A LoRA adapter of the tiny verifier, with random factors."""
    torch.manual_seed(3)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(tiny.verifier().model, config)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.3)
    folder = tmp_path_factory.mktemp("adapter")
    model.save_pretrained(folder)
    return str(folder)


def test_names_come_apart(tmp_path: Path) -> None:
    assert split("a/b+c/d") == ("a/b", "c/d") and split("a/b") == ("a/b", None)
    assert join("a/b", "c/d") == "a/b+c/d" and join("a/b", None) == "a/b"
    (tmp_path / "with+plus").mkdir()
    assert split(str(tmp_path / "with+plus")) == (str(tmp_path / "with+plus"), None)


def test_states_are_those_of_the_unmerged_adapter(verifier: str, adapter: str) -> None:
    unmerged = peft.PeftModel.from_pretrained(tiny.verifier().model, adapter)
    loaded, plain = Verifier.load(f"{verifier}+{adapter}"), Verifier.load(verifier)
    ids = torch.randint(0, 64, (2, 12))
    with torch.no_grad():
        logits = loaded.logits(loaded.states(ids).last_hidden)
        assert torch.allclose(logits, unmerged(input_ids=ids).logits, atol=1e-4)
        assert not torch.allclose(logits, plain.logits(plain.states(ids).last_hidden), atol=1e-2)
    assert loaded.fingerprint() != plain.fingerprint()
    assert not any(weight.requires_grad for weight in loaded.model.parameters())


def test_drafter_is_answered_trained_and_loaded_with_the_adapter(
    tmp_path: Path, verifier: str, adapter: str
) -> None:  # fmt: skip
    prompts = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "w1 w2 w3"}]
    prompts.write_text(json.dumps({"id": "a", "messages": messages}) + "\n")
    settings = recipe(tmp_path, verifier, max_steps=1)
    for name, added in (("plain", None), ("tuned", adapter)):
        out = str(tmp_path / f"{name}.jsonl")
        regenerate.run(
            regenerate.Regenerate(
                out, verifier=verifier, adapter=added, prompts=str(prompts), max_new_tokens=12
            )
        )
    assert (tmp_path / "plain.jsonl").read_text() != (tmp_path / "tuned.jsonl").read_text()
    settings.adapter, settings.data.train = adapter, out
    settings.data.eval = None
    run(settings)
    last = str(tmp_path / "run" / "checkpoints" / "step-000001")
    found, _ = load_pair(None, last, "float32", "cpu")
    assert found.name == f"{verifier}+{adapter}"
    assert "merge the adapter" in Path(last, "README.md").read_text()
    with pytest.raises(ValueError, match=r"verifier: .* with the adapter .*pass its folder as --v"):
        kinds.verifier_of(None, last)
    with pytest.raises(ValueError, match=r"verifier: .* with the adapter .*pass its folder as --v"):
        export.run(export.Export(drafter=last, to="speculators", out=str(tmp_path / "exported")))
    assert not (tmp_path / "exported").exists()
    with pytest.raises(ValueError, match=r"was trained for .*\+.*, the verifier is"):
        load_pair(verifier, last, "float32", "cpu")


def test_adapter_that_is_none_is_named(
    tmp_path: Path, verifier: str, adapter: str
) -> None:  # fmt: skip
    with pytest.raises(ValueError, match=r"adapter '.*nowhere': no such folder"):
        Verifier.load(f"{verifier}+{tmp_path}/nowhere")
    with pytest.raises(ValueError, match=r"adapter: its name is empty"):
        Verifier.load(f"{verifier}+")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "adapter_config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"adapter '.*odd' cannot be read, or is not this"):
        Verifier.load(f"{verifier}+{tmp_path}/odd")
    wider = tiny.save(tiny.verifier(hidden_size=64), tmp_path / "wider")
    with pytest.raises(ValueError, match=r"adapter .* is not this verifier's: .*size mismatch"):
        Verifier.load(f"{wider}+{adapter}")


@pytest.mark.parametrize(
    ("layers", "said"),
    [(6, "the verifier has no place for 8 tensors"), (10, "the adapter lacks 8 tensors")],
)
def test_adapter_of_a_model_of_another_depth_is_refused(
    tmp_path: Path, adapter: str, layers: int, said: str
) -> None:
    other = tiny.save(tiny.verifier(num_hidden_layers=layers), tmp_path / "other")
    with pytest.raises(ValueError, match=rf"adapter .* is not this verifier's: {said}, .*layers"):
        Verifier.load(f"{other}+{adapter}")


def test_adapter_that_is_not_lora_is_refused(tmp_path: Path, verifier: str) -> None:
    config = peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[])
    peft.get_peft_model(tiny.verifier().model, config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"is not this verifier's: it is of type IA3; pass"):
        Verifier.load(f"{verifier}+{tmp_path}")


@pytest.mark.parametrize("method", ["awq", "gptq", "made-up"])
def test_quantised_verifier_that_cannot_be_loaded_here_is_refused_by_name(
    tmp_path: Path, method: str
) -> None:
    folder = Path(tiny.save(tiny.verifier(), tmp_path / "verifier"))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 32}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"[('\"]{method}[)'\"]") as caught:
        Verifier.load(str(folder))
    assert "\n" not in str(caught.value) and "cannot be loaded" in str(caught.value)
