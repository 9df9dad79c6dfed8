"""What an engine is told of a drafter, and what it must not be given."""

import json
from pathlib import Path

import pytest
import tiny
import torch

from headstart.eval.engines.commands import loader_arguments, speculative_config
from headstart.eval.engines.kinds import verifier_of
from headstart.models import export
from headstart.models.drafter import TrainableDrafter
from headstart.models.drafters.draft_lm import DraftLM, DraftLMConfig
from headstart.models.drafters.eagle1 import Eagle1, Eagle1Config
from headstart.models.drafters.eagle3 import Eagle3, Eagle3Config
from headstart.models.drafters.hydra_heads import HydraHeads, HydraHeadsConfig
from headstart.models.drafters.medusa import Medusa, MedusaConfig
from headstart.models.drafters.mtp import MTP
from headstart.models.drafters.mtp_layouts import MTPConfig
from headstart.models.losses import LossConfig
from headstart.models.verifier.verifier import Verifier

VERIFIER = tiny.verifier()
LOSS, ONES = LossConfig(num_steps=3), torch.ones(64)


def medusa(**settings) -> Medusa:
    return Medusa.create(VERIFIER, MedusaConfig(**settings), LOSS, ONES)


MAKERS = {
    "eagle3": lambda: Eagle3.create(VERIFIER, Eagle3Config(), LOSS, ONES),
    "eagle": lambda: Eagle1.create(VERIFIER, Eagle1Config(), LOSS),
    "medusa": lambda: medusa(),
    "draft_model": lambda: DraftLM.create(VERIFIER, DraftLMConfig("layers:0,7"), LOSS),
}


def saved(drafter: TrainableDrafter, folder: Path, **entry: str) -> str:
    """The drafter's folder, with changes to the headstart entry of its config."""
    drafter.save(folder)
    config = json.loads((folder / "config.json").read_text())
    config["headstart"] |= entry
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("method", MAKERS)
def test_method_is_that_of_the_checkpoint_whatever_its_folder_is_called(tmp_path, method):
    """vLLM would take any folder named eagle-something for an EAGLE."""
    folder = saved(MAKERS[method](), tmp_path / "eagle-1-eagle3-dflash")
    wanted = {"method": method, "model": folder, "num_speculative_tokens": 3}
    assert speculative_config(folder, 3) == wanted
    assert loader_arguments(folder) == []


def test_prompt_lookup_is_ngram():
    assert speculative_config("prompt-lookup:max_ngram=4,min_ngram=2", 5) == {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
    }


def test_another_model_is_a_draft_model(tmp_path):
    folder = tiny.save(VERIFIER, tmp_path / "small")
    wanted = {"method": "draft_model", "model": folder, "num_speculative_tokens": 2}
    assert speculative_config(folder, 2) == wanted


def foreign(drafter: TrainableDrafter, folder: Path, **config: object) -> str:
    """The folder as another program would have written it."""
    saved(drafter, folder)
    read = json.loads((folder / "config.json").read_text())
    del read["headstart"]
    (folder / "config.json").write_text(json.dumps(read | config))
    return str(folder)


@pytest.mark.parametrize("method", ["eagle3", "eagle", "medusa"])
def test_method_of_another_programs_drafter_is_that_of_its_kind(tmp_path, method):
    folder = foreign(MAKERS[method](), tmp_path / "drafter")
    assert speculative_config(folder, 3)["method"] == method
    with pytest.raises(ValueError, match="pass --verifier"):
        verifier_of(None, folder)


def test_another_programs_drafter_that_would_not_work_is_refused(tmp_path):
    other = foreign(MAKERS["eagle3"](), tmp_path / "other", speculators_model_type="dspark")
    refused(other, 2, "speculators' kind dspark")
    sglang = foreign(MAKERS["eagle3"](), tmp_path / "sglang", layer_ids_of="sglang")
    refused(sglang, 2, "written for SGLang")
    refused(foreign(medusa(), tmp_path / "medusa"), 4, "draft_length is 4, but .* has 3 heads")


def test_a_verifier_with_an_mtp_module_drafts_for_itself(tmp_path):
    verifier = Verifier.load(tiny.save(VERIFIER, tmp_path / "verifier"))
    module = saved(MTP.create(verifier, MTPConfig(), LOSS), tmp_path / "module")
    refused(module, 3, f"models/export.py {module} --to mimo")
    two = MTP.create(verifier, MTPConfig(num_modules=2), LossConfig(num_steps=2, gamma=1.0))
    refused(saved(two, tmp_path / "two"), 3, "2 MTP modules, of which vLLM runs one")
    folder = str(tmp_path / "both")
    export.run(export.Export(module, "mimo", folder))
    assert speculative_config(folder, 3) == {"method": "mtp", "num_speculative_tokens": 3}
    assert loader_arguments(folder) == []
    assert verifier_of(None, folder) == verifier_of(folder, folder) == folder
    with pytest.raises(ValueError, match="module of its own, which drafts for no other"):
        verifier_of("other/model", folder)


def refused(drafter: str, draft_length: int, said: str) -> None:
    with pytest.raises(ValueError, match=said) as error:
        speculative_config(drafter, draft_length)
    assert "\n" not in str(error.value)


def test_what_vllm_does_not_load_is_refused_with_the_reason(tmp_path):
    hydra = HydraHeads.create(VERIFIER, HydraHeadsConfig(), LOSS, ONES)
    refused(saved(hydra, tmp_path / "hydra"), 2, "type hydra_heads, which vLLM does not load")
    refused("lookahead", 2, "vLLM knows no lookahead")
    refused("layers:0-5", 2, "train/draft_lm.py --drafter.init layers:0-5")
    refused(str(tmp_path / "nowhere"), 2, "no such folder")
    own = medusa(shared_projection=False, draft_vocab_size=48)
    refused(saved(own, tmp_path / "own"), 2, "drafter.shared_projection true")
    refused(saved(medusa(), tmp_path / "joint", adapter="x"), 2, "merge the adapter")
    refused(saved(medusa(), tmp_path / "new", type="later"), 2, "type 'later', .* does not know")


def test_a_mistyped_folder_is_not_taken_for_a_name_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").mkdir()
    refused("outputs/nope", 2, "drafter 'outputs/nope' is not a checkpoint .* no such folder")
    refused("outputs/run/nope", 2, "'outputs/run/nope' is not a checkpoint .* no such folder")
    for name in ("outputs/nope", "outputs/run/nope", "./nope", str(tmp_path / "nope")):
        with pytest.raises(ValueError, match=f"verifier '{name}': no such folder"):
            verifier_of(name, "prompt-lookup")
    assert speculative_config("some/model", 2, "draft_model")["model"] == "some/model"
    assert verifier_of("some/model", "prompt-lookup") == "some/model"


def test_more_drafts_than_heads_are_refused(tmp_path):
    folder = saved(medusa(), tmp_path / "medusa")
    assert speculative_config(folder, 3)["num_speculative_tokens"] == 3
    refused(folder, 4, "draft_length is 4, but .* has 3 heads")
    refused(folder, 0, "draft_length must be 1 or more, got 0")
    eagle3 = saved(MAKERS["eagle3"](), tmp_path / "eagle3")  # as many as one likes
    assert speculative_config(eagle3, 7)["num_speculative_tokens"] == 7


def test_a_draft_model_of_another_vocabulary_is_refused(tmp_path):
    folder = saved(MAKERS["draft_model"](), tmp_path / "lm", target_vocab_size=80)
    refused(folder, 2, "has 64 tokens, its verifier 80")


def test_a_medusa_with_a_draft_vocabulary_is_loaded_unchecked(tmp_path):
    folder = saved(medusa(draft_vocab_size=48), tmp_path / "medusa")
    option, value = loader_arguments(folder)
    assert option == "--model-loader-extra-config"
    assert json.loads(value) == {"enable_weights_track": False}
    assert loader_arguments("prompt-lookup") == []
    other = foreign(medusa(draft_vocab_size=48), tmp_path / "other")
    assert loader_arguments(other) == [option, value]


def test_verifier_is_the_drafters_own_unless_given(tmp_path):
    folder = saved(MAKERS["eagle3"](), tmp_path / "eagle3")
    assert verifier_of(None, folder) == "tiny/llama"
    assert verifier_of("other/model", folder) == "other/model"
    with pytest.raises(ValueError, match="pass --verifier"):
        verifier_of(None, "prompt-lookup")
