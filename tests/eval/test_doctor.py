"""The doctor: six defects by name, no false alarm, and what the folder alone shows."""

import json
import shutil
import sys
from pathlib import Path

import foreign
import pytest
import torch
import workplace
from accelerate.state import AcceleratorState
from broken import (
    Change,
    Config,
    absolute_map,
    flipped_norm,
    other_theta,
    shifted_layers,
    without_map,
)
from overfit import DRAFTERS
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstart.data.rows.row import Row
from headstart.eval import doctor
from headstart.eval.doctor import Diagnosis, Doctor
from headstart.eval.health import checks, probe
from headstart.models import export
from headstart.models.drafters.eagle3 import Eagle3Config, with_layer_ids
from headstart.models.loading import load
from headstart.models.losses import LossConfig
from headstart.models.verifier.verifier import Verifier
from headstart.script import run_script
from headstart.train import eagle3
from headstart.train.run.settings import DataConfig, TrainingConfig

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A verifier, its answers to twelve prompts, and a drafter that knows these by heart."""
    folder = tmp_path_factory.mktemp("place")
    workplace.make(folder, [("chat", i) for i in range(12)])
    answers = str(folder / "t0.jsonl")
    AcceleratorState._reset_state()
    eagle3.run(
        eagle3.Recipe(
            DataConfig(answers, answers, max_length=64, batch_tokens=512, packed=False),
            TrainingConfig(
                str(folder / "run"), max_steps=300, learning_rate=5e-3, mixed_precision="no",
                validate_every=100, draft_length=3,
            ),
            str(folder / "verifier"),
            loss=LossConfig("hard_ce", num_steps=3, gamma=1.0),
            drafter=Eagle3Config(draft_vocab_size=36, init="random"),
        )
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def verifier(place: Path) -> Verifier:
    return Verifier.load(str(place / "verifier"))


def copied(place: Path, folder: Path, change: Change | None = None, recorded: bool = True) -> str:
    """The trained drafter with something changed, its history beside it or not."""
    shutil.copytree(place / "run" / "best", folder)
    if not recorded:
        shutil.rmtree(folder / "resume")
    if change is not None:
        config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        change(config, tensors)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors")
    return str(folder)


def examined(place: Path, drafter: str, verifier: Verifier, recorded: bool = True) -> Diagnosis:
    prompts = None if recorded else str(place / "prompts.jsonl")
    settings = Doctor(drafter, prompts=prompts, max_new_tokens=20, draft_length=3, num_prompts=10)
    return doctor.diagnose(settings, doctor.admit(drafter, verifier), verifier)


def without_both_maps(config: Config, tensors: dict[str, Tensor]) -> None:
    del tensors["d2t"], tensors["t2d"]


def random_embeddings(config: Config, tensors: dict[str, Tensor]) -> None:
    random = torch.Generator().manual_seed(0)
    tensors["embed_tokens.weight"] = torch.randn(64, 32, generator=random) * 0.02


BROKEN: dict[str, tuple[str, Change, str]] = {
    "missing map": ("vocabulary map", without_map, "d2t is missing"),
    "both maps missing": ("vocabulary map", without_both_maps, "d2t is missing"),
    "absolute map": ("vocabulary map", absolute_map, "holds token ids where offsets belong"),
    "layers one too low": ("layer ids", shifted_layers(-1), "one higher"),
    "layers one too high": ("layer ids", shifted_layers(1), "one lower"),
    "norm flipped": ("norm_before_residual", flipped_norm, "is true, but it was trained with"),
    "random embeddings": ("embed_tokens", random_embeddings, "the verifier's are"),
    "other theta": ("rope", other_theta, "theta 20"),
}


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "not recorded"])
def test_a_healthy_drafter_has_no_defect(recorded, place, verifier, tmp_path):
    drafter = copied(place, tmp_path / "drafter", recorded=recorded)
    found = examined(place, drafter, verifier, recorded)
    assert found.findings == []
    assert found.measured["conditional"][0] > 0.95
    assert (found.recorded is not None) == recorded


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "not recorded"])
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_drafter_s_defect_is_named(name, recorded, place, verifier, tmp_path):
    check, change, what = BROKEN[name]
    drafter = copied(place, tmp_path / "drafter", change, recorded)
    found = examined(place, drafter, verifier, recorded)
    named = {finding.check: finding for finding in found.defects}
    assert set(named) - {"acceptance"} == {check}
    assert what in named[check].what
    if recorded:
        what = named["acceptance"].what
        assert "training reported" in what or "cannot be run" in what


def alike(verifier: Verifier) -> Verifier:
    """A verifier whose layers add so little that neighbours can hardly be told apart."""
    for layer in verifier.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight.data.mul_(1e-4)
    return verifier


@pytest.mark.parametrize("by", [-1, 1])
def test_shifted_layers_that_cost_nothing_are_named_by_the_recipe(by, place, tmp_path):
    """Drafting cannot show them, as in a deep model; the recipe beside the checkpoint does."""
    verifier = alike(Verifier.load(str(place / "verifier")))
    drafter = copied(place, tmp_path / "drafter", shifted_layers(by), recorded=False)
    patient = doctor.admit(drafter, verifier)
    (found,) = (f for f in checks.examine(patient, verifier) if f.check == "layer ids")
    assert found.severity == "defect" and "trained on [2, 4, 5]" in found.what
    batch = probe.batch_of([Row(list(range(3, 40)), [0] * 5 + [1] * 32, "")])
    named, _ = probe.diagnose(patient, verifier, batch, 3)
    assert "layer ids" not in {f.check for f in named}
    recipe = tmp_path / "drafter" / "recipe.yaml"
    for text in (
        "init_from: outputs/other\ndrafter: {feature_layers: [1, 2, 3]}",
        "no: recipe",
        "- [",
        None,
    ):
        recipe.unlink() if text is None else recipe.write_text(text)
        assert doctor.admit(drafter, verifier).trained_layers is None


def test_two_defects_are_both_named(place, verifier, tmp_path):
    def change(config: Config, tensors: dict[str, Tensor]) -> None:
        absolute_map(config, tensors)
        shifted_layers(-1)(config, tensors)

    drafter = copied(place, tmp_path / "drafter", change, recorded=False)
    found = examined(place, drafter, verifier, recorded=False)
    assert {finding.check for finding in found.defects} >= {"vocabulary map", "layer ids"}


def test_what_was_trained_away_from_its_record_is_seen_without_a_name(place, verifier, tmp_path):
    """Weights drawn anew: no reading mends them, but training reported more."""

    def change(config: Config, tensors: dict[str, Tensor]) -> None:
        torch.manual_seed(0)
        tensors["midlayer.mlp.down_proj.weight"].normal_()

    drafter = copied(place, tmp_path / "drafter", change)
    (defect,) = examined(place, drafter, verifier).defects
    assert defect.check == "acceptance" and "go back to the run's checkpoint" in defect.mend


def test_validation_s_answers_must_be_greedy_and_others_are_written_anew(place, verifier, tmp_path):
    drafter = copied(place, tmp_path / "drafter")
    recipe = Path(drafter) / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("t0.jsonl", "t1.jsonl"))
    assert "t1.jsonl" in recipe.read_text()
    said = r"data\.eval .*t1\.jsonl' of its recipe: chat-0 was answered at temperature 1, not at .*"
    with pytest.raises(ValueError, match=said + "pass --prompts FILE"):
        examined(place, drafter, verifier)
    assert examined(place, drafter, verifier, recorded=False).findings == []


# ---- the folder alone --------------------------------------------------------------------------


def not_finite(config: Config, tensors: dict[str, Tensor]) -> None:
    tensors["fc.weight"][3, 4] = torch.nan


def missing_tensor(config: Config, tensors: dict[str, Tensor]) -> None:
    del tensors["norm.weight"]


def unknown_tensor(config: Config, tensors: dict[str, Tensor]) -> None:
    tensors["midlayer.self_attn.q_proj.bias"] = torch.zeros(32)


def wrong_shape(config: Config, tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:30].clone()


def flat_tensor(config: Config, tensors: dict[str, Tensor]) -> None:
    tensors["midlayer.mlp.up_proj.weight"].zero_()


def unsorted_layers(config: Config, tensors: dict[str, Tensor]) -> None:
    config |= with_layer_ids(config, [4, 2, 5])


def four_layers(config: Config, tensors: dict[str, Tensor]) -> None:
    config["num_aux_hidden_states"] = 4


def other_verifier(config: Config, tensors: dict[str, Tensor]) -> None:
    config["headstart"] |= {"verifier": "some/model", "fingerprint": "0" * 16}


def no_terminator(config: Config, tensors: dict[str, Tensor]) -> None:
    """Id 2, which ends answers, gives way to one that is not in the vocabulary."""
    ids = (tensors["d2t"] + torch.arange(36)).tolist()
    free = next(i for i in range(63, 2, -1) if i not in ids)
    ids = torch.tensor(sorted({*ids, free} - {2}))
    tensors["d2t"] = ids - torch.arange(36)
    tensors["t2d"] = torch.zeros(64, dtype=torch.bool).index_fill(0, ids, True)


def other_members(config: Config, tensors: dict[str, Tensor]) -> None:
    tensors["t2d"] = ~tensors["t2d"]


@pytest.mark.parametrize(
    "change, check, what",
    [
        (not_finite, "tensors", "fc.weight: not every number is finite"),
        (missing_tensor, "tensors", "missing: norm.weight"),
        (unknown_tensor, "tensors", "unexpected: midlayer.self_attn.q_proj.bias"),
        (wrong_shape, "tensors", "lm_head.weight [30, 32] where [36, 32] is wanted"),
        (flat_tensor, "never trained", "midlayer.mlp.up_proj.weight: one number throughout"),
        (unsorted_layers, "layer ids", "[4, 2, 5] are not distinct, ascending ids in 1 … 8"),
        (four_layers, "layer ids", "3 ids, num_aux_hidden_states 4, and fc reads 3 features"),
        (other_verifier, "fingerprint", "it was made for some/model"),
        (no_terminator, "terminators", "<|im_end|> cannot be drafted"),
        (other_members, "vocabulary map", "d2t and t2d name different tokens"),
    ],
)
def test_what_the_folder_shows_is_named(change, check, what, place, verifier, tmp_path):
    drafter = copied(place, tmp_path / "drafter", change, recorded=False)
    found = examined(place, drafter, verifier, recorded=False)
    assert any(f.check == check and what in f.what for f in found.defects), found.defects


def one_norm(config: Config, tensors: dict[str, Tensor]) -> None:
    tensors["norm.weight"].fill_(1)


def no_flag(config: Config, tensors: dict[str, Tensor]) -> None:
    del config["norm_before_residual"]


def short_context(config: Config, tensors: dict[str, Tensor]) -> None:
    config["max_position_embeddings"] = 48


@pytest.mark.parametrize(
    "change, check, what",
    [
        (one_norm, "norms", "norm.weight: all ones"),
        (no_flag, "norm_before_residual", "config.json does not say"),
        (short_context, "rope", "max_position_embeddings is 48, the verifier's 96"),
    ],
)
def test_what_need_not_hurt_is_noted(change, check, what, place, verifier, tmp_path):
    drafter = copied(place, tmp_path / "drafter", change, recorded=False)
    found = examined(place, drafter, verifier, recorded=False)
    assert any(f.check == check and what in f.what for f in found.findings), found.findings
    assert all(f.severity == "note" for f in found.findings if f.check == check)


# ---- other programs' folders, other kinds ------------------------------------------------------


def test_a_folder_of_another_program_is_examined(place, verifier, tmp_path):
    drafter = load(str(place / "run" / "best"), verifier)
    written = export.converted(drafter, "eagle", "some/verifier")
    export.write(*written, tmp_path / "eagle", torch.float32)
    found = examined(place, str(tmp_path / "eagle"), verifier, recorded=False)
    assert found.defects == [] and found.measured["conditional"][0] > 0.95
    assert [f.check for f in found.findings] == ["fingerprint"]  # which it does not have
    tensors = foreign.tensors_in(tmp_path / "eagle")
    tensors["d2t"] += torch.arange(36)
    torch.save(tensors, tmp_path / "eagle" / "pytorch_model.bin")
    found = examined(place, str(tmp_path / "eagle"), verifier, recorded=False)
    assert {f.check for f in found.defects} == {"vocabulary map", "acceptance"}


def test_ids_counted_as_sglang_counts_are_noted(place, verifier, tmp_path):
    drafter = load(str(place / "run" / "best"), verifier)
    written = export.converted(drafter, "sglang", "some/verifier")
    export.write(*written, tmp_path / "sglang", torch.float32)
    found = examined(place, str(tmp_path / "sglang"), verifier, recorded=False)
    assert found.defects == []
    notes = {f.check: f for f in found.findings}
    assert "[1, 3, 4] are the ids as SGLang counts them" in notes["layer ids"].what


def test_a_bias_that_vllm_leaves_out_is_a_defect(place, verifier, tmp_path):
    own = verifier.model.get_input_embeddings().weight.detach()
    foreign.original_eagle1(tmp_path, own, bias=True)
    found = examined(place, str(tmp_path), verifier, recorded=False)
    assert any(f.what == "fc has a bias" for f in found.defects)


def test_a_medusa_head_that_was_never_trained_is_seen(place, verifier, tmp_path):
    foreign.original_medusa(tmp_path)
    tensors = foreign.tensors_in(tmp_path)
    tensors["2.0.linear.weight"].zero_()
    torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    found = examined(place, str(tmp_path), verifier, recorded=False)
    (defect,) = found.defects
    assert (defect.check, defect.what) == (
        "never trained",
        "blocks.2.layers.0.weight: one number throughout",
    )


def test_every_kind_of_checkpoint_can_be_examined(place, verifier, tmp_path):
    for name, make in DRAFTERS.items():
        folder = tmp_path / name
        make(verifier).save(folder)
        found = examined(place, str(folder), verifier, recorded=False)
        assert found.measured is not None and found.recorded is None, name
        assert not {f.check for f in found.defects} - {"never trained"}, name


# ---- the script --------------------------------------------------------------------------------


def told(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> int:
    monkeypatch.setattr(sys, "argv", ["doctor.py", *words])
    try:
        run_script(Doctor, doctor.run, first="drafter")
    except SystemExit as stop:
        return stop.code
    return 0


def test_script_reports_and_ends_with_a_code(place, tmp_path, monkeypatch, capsys):
    words = ["--num_prompts", "10"]
    assert told(monkeypatch, [copied(place, tmp_path / "healthy"), *words]) == 0
    output = capsys.readouterr().out
    assert "eagle3 for" in output and "training reported:" in output
    assert output.endswith("no defect found\n")
    broken = copied(place, tmp_path / "broken", flipped_norm)
    assert told(monkeypatch, [broken, "--verifier", str(place / "verifier"), *words]) == 3
    output = capsys.readouterr().out
    assert "DEFECT norm_before_residual: norm_before_residual is true" in output
    assert "effect:" in output and "mend:   write norm_before_residual: false" in output
    assert "2 defects" in output  # the other: less is accepted than training reported


@pytest.mark.parametrize(
    "words, message",
    [
        (["nowhere"], "drafter 'nowhere' is not a checkpoint of headstart: no such folder"),
        (["x", "--num_prompts", "0"], "num_prompts must be 1 or more, got 0"),
    ],
)
def test_what_cannot_be_examined_is_refused_in_one_line(words, message, monkeypatch, capsys):
    assert told(monkeypatch, words) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_folder_without_a_verifier_s_name_needs_one(tmp_path, monkeypatch, capsys):
    foreign.original_medusa(tmp_path)
    assert told(monkeypatch, [str(tmp_path)]) == 2
    assert "does not say for which it was made; pass --verifier" in capsys.readouterr().err
