"""Rotary positions that change with the text's length: one set for a whole run, or a refusal."""

from pathlib import Path

import pytest
import torch
from tiny import save, tokenizer
from tiny import verifier as tiny_verifier
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from headstart.eval.decoding.speculate import generate
from headstart.eval.engines import commands, kinds
from headstart.models.drafters.draft_lm import DraftLM, DraftLMConfig
from headstart.models.drafters.eagle1 import Eagle1, Eagle1Config
from headstart.models.drafters.eagle3 import Eagle3, Eagle3Config
from headstart.models.drafters.mtp import MTP
from headstart.models.drafters.mtp_layouts import MTPConfig
from headstart.models.loading import load_checkpoint, load_pair
from headstart.models.losses import LossConfig
from headstart.models.proposal.proposal import Drafting
from headstart.models.proposal.sampling import Sampling
from headstart.models.proposal.trees import cartesian, chain
from headstart.models.verifier import rotary
from headstart.models.verifier.outline import Outline
from headstart.models.verifier.partial import PartialVerifier
from headstart.models.verifier.verifier import Verifier
from headstart.train.run.checkpoint import model_card

BORDER, WHOLE = 16, 64
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 3.0, 9.0, 27.0], "original_max_position_embeddings": BORDER,
}  # fmt: skip
PHI = {
    "rope_parameters": LONGROPE, "original_max_position_embeddings": BORDER,
    "max_position_embeddings": WHOLE, "num_hidden_layers": 3, "pad_token_id": 0,
}  # fmt: skip
DYNAMIC = {
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
    "max_position_embeddings": BORDER, "num_hidden_layers": 3,
}  # fmt: skip
ENGINE_LENGTHS = {"vllm": "--max-model-len", "sglang": "--context-length"}  # that load EAGLE-1
LOSS = LossConfig("hard_ce", num_steps=3, gamma=1.0)
DRAFTERS = {
    "eagle3": lambda v: Eagle3.create(v, Eagle3Config((1, 2)), LOSS, torch.ones(v.vocab_size)),
    "eagle1": lambda v: Eagle1.create(v, Eagle1Config("random"), LOSS),
    "mtp": lambda v: MTP.create(v, MTPConfig(), LOSS),
    "draft_lm": lambda v: DraftLM.create(v, DraftLMConfig("layers:0,1"), LOSS),
}
GREEDY = {"sampling": Sampling(), "drafting": Drafting(False, Sampling())}
PROMPTS = [list(range(5, 5 + n)) for n in (1, 3, 9, 12)]


def phi(length: int | None = None) -> Verifier:
    made = tiny_verifier("phi3", **PHI)
    made = Verifier(made.model, made.tokenizer, made.name, length)
    made.terminator_ids = ()
    return made


def of_one_set(factors: str) -> torch.nn.Module:
    """The model with the same factors on both sides of the border."""
    rope = LONGROPE | dict.fromkeys(("short_factor", "long_factor"), LONGROPE[factors])
    return tiny_verifier("phi3", **(PHI | {"rope_parameters": rope})).model


@torch.no_grad()
def plain(model: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        logits = model(input_ids=torch.tensor([text]), use_cache=False).logits
        text.append(int(logits[0, -1].argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("length, factors", [(None, "short_factor"), (WHOLE, "long_factor")])
@torch.no_grad()
def test_one_set_of_factors_serves_every_text(length: int | None, factors: str) -> None:
    """Short ones and, with the long factors, those that cross the border, alone and in a batch."""
    reference, verifier = of_one_set(factors), phi(length)
    for size in (3, BORDER, BORDER + 1, 40)[: None if length else 2]:
        ids = torch.arange(size)[None] % 50 + 5
        expected = reference(input_ids=ids, use_cache=False).logits
        got = verifier.logits(verifier.states(ids).last_hidden)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-5)
    assert verifier.context_length == (length or BORDER)


@pytest.mark.parametrize("shape", [chain(3), cartesian(3, 2, 1)], ids=["chain", "tree"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_texts_that_cross_the_border_are_the_verifiers(name: str, shape) -> None:
    verifier = phi(WHOLE)
    outputs = generate(
        verifier, DRAFTERS[name](verifier).eval(), PROMPTS, shape=shape, max_new_tokens=24, **GREEDY
    )
    reference = of_one_set("long_factor")
    assert [o.tokens for o in outputs] == [plain(reference, p, 24) for p in PROMPTS]


@pytest.mark.parametrize("name", DRAFTERS)
@torch.no_grad()
def test_a_drafters_positions_do_not_change_with_its_batch(name: str) -> None:
    """In training, step s of the last slots lies s tokens beyond the text, across the border."""
    verifier = phi()
    drafter = DRAFTERS[name](verifier).eval()
    ids = torch.arange(BORDER)[None] % 50 + 5

    def unrolled(width: int, steps: int) -> torch.Tensor:
        positions = torch.arange(width)[None]
        batch = {"input_ids": ids[:, :width], "position_ids": positions}
        batch |= {"document_ids": torch.zeros_like(positions)}
        batch |= verifier.states(ids[:, :width], drafter.feature_layers)._asdict()
        return next(iter(list(drafter.unroll(batch, steps))))

    whole, part = unrolled(BORDER, 3), unrolled(BORDER - 6, 1)
    torch.testing.assert_close(whole[:, : BORDER - 7], part[:, :-1], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    "rope, expected",
    [
        (None, None),
        ({"rope_type": "default", "rope_theta": 1e4}, None),
        (LONGROPE, BORDER),
        (DYNAMIC["rope_parameters"], 512),
        ({"full_attention": LONGROPE, "sliding_attention": {"rope_type": "default"}}, BORDER),
    ],
)
def test_the_border_is_where_positions_change(rope: dict | None, expected: int | None) -> None:
    config = PretrainedConfig(max_position_embeddings=512)
    config.rope_parameters = rope
    assert rotary.border(config) == expected


def test_a_text_that_could_cross_the_border_is_refused_before_anything_is_computed() -> None:
    with pytest.raises(ValueError, match=rf"context of 'tiny/phi3', {BORDER}; .*MODEL@{WHOLE}"):
        generate(phi(), None, [[5] * 10], shape=None, max_new_tokens=7,
                 sampling=Sampling(), drafting=None)  # fmt: skip


def test_dynamic_scaling_is_refused_beyond_its_border() -> None:
    """Its frequencies are those of plain positions below it, whatever ran before."""
    verifier = tiny_verifier(**DYNAMIC)
    verifier.terminator_ids = ()
    with pytest.raises(ValueError, match=rf"beyond {BORDER} its rotary positions change"):
        generate(verifier, None, [[5] * 10], shape=None, max_new_tokens=7,
                 sampling=Sampling(), drafting=None)  # fmt: skip
    drafter = Eagle1.create(verifier, Eagle1Config("random"), LOSS).eval()
    before = drafter.rotary(torch.zeros(1), torch.arange(4)[None])
    drafter.rotary(torch.zeros(1), torch.arange(BORDER + 3)[None])
    after = drafter.rotary(torch.zeros(1), torch.arange(4)[None])
    torch.testing.assert_close(before, after, rtol=0, atol=0)


# ---- names, identity, serving ------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tiny_verifier("phi3", **PHI), tmp_path_factory.mktemp("models") / "phi")


def test_a_name_may_end_with_the_length_of_its_texts(folder: str) -> None:
    short, below, long = (Verifier.load(f"{folder}{end}") for end in ("", "@12", f"@{WHOLE}"))
    assert [v.context_length for v in (short, below, long)] == [BORDER, 12, WHOLE]
    assert short.fingerprint() == below.fingerprint() != long.fingerprint()
    assert PartialVerifier.read(long.name, "float32", "cpu").fingerprint() == long.fingerprint()
    assert Outline.read(long.name).context_length == WHOLE
    assert Outline.read(folder).context_length == BORDER


@pytest.mark.parametrize("length", [1, WHOLE + 1])
def test_a_length_that_the_model_cannot_have_is_refused(folder: str, length: int) -> None:
    with pytest.raises(ValueError, match=rf"^verifier '.*': @{length} must be .* 2 … {WHOLE} tok"):
        Verifier.load(f"{folder}@{length}")
    with pytest.raises(ValueError, match="must be a length"):
        Outline.read(f"{folder}@{length}")


def test_drafters_of_short_and_long_factors_are_not_mixed(folder: str, tmp_path: Path) -> None:
    drafter = DRAFTERS["eagle1"](Verifier.load(f"{folder}@{WHOLE}"))
    drafter.save(tmp_path)
    verifier, again = load_pair(None, str(tmp_path), "float32", "cpu")
    assert verifier.context_length == WHOLE and again.verifier.long_rotary
    with pytest.raises(ValueError, match=rf"was trained for .*@{WHOLE} .*the verifier is {folder}"):
        load_checkpoint(tmp_path, Verifier.load(folder))


@pytest.mark.parametrize("end, tokens", [("", BORDER), (f"@{WHOLE}", WHOLE), ("@12", 12)])
def test_the_engine_is_told_the_length(folder: str, tmp_path: Path, end: str, tokens: int) -> None:
    DRAFTERS["eagle1"](Verifier.load(folder + end)).save(tmp_path)
    assert kinds.verifier_of(None, str(tmp_path)) == folder
    for engine, name in ENGINE_LENGTHS.items():
        (*_, words) = commands.lines(engine, str(tmp_path), None, 2, [], None)
        place = words.index(name)
        assert words[place + 1] == str(tokens) and folder in words


@pytest.mark.parametrize("end, tokens", [("", BORDER), (f"@{WHOLE}", WHOLE)])
def test_the_model_card_says_it_too(folder: str, end: str, tokens: int) -> None:
    drafter = DRAFTERS["eagle1"](Verifier.load(folder + end))
    card = model_card(
        {"verifier": folder + end}, {"step": 1, "tokens": 1, "validation": None}, drafter
    )
    assert f"    vllm serve {folder} --max-model-len {tokens} --spec" in card


def test_an_engine_chooses_the_length_of_other_models(tmp_path: Path) -> None:
    folder = save(tiny_verifier(), tmp_path)
    assert commands.length_arguments("vllm", "prompt-lookup", folder) == []


def test_a_draft_model_has_the_factors_that_an_engine_gives_it(folder: str) -> None:
    """One --max-model-len rules both."""
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama", vocab_size=64, hidden_size=32, num_hidden_layers=1,
                             num_attention_heads=4, intermediate_size=48)
    )  # fmt: skip
    verifier = Verifier(model, tokenizer(64), "long")
    lm = DraftLM.create(verifier, DraftLMConfig(folder), LOSS).lm
    assert lm.long_rotary and lm.context_length == WHOLE
