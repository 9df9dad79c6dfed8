"""Every causal family of the installed transformers, tiny, and what becomes of five drafters on it.

    python tests/support/families.py docs/verifiers.md

writes the table of families into that page.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from small_texts import PROMPTS
from tiny import tokenizer
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from headstart.data.rows.collate import collate
from headstart.data.rows.row import Row
from headstart.data.states.featurize import Featurizer
from headstart.eval.decoding.speculate import generate
from headstart.eval.measures.replay import replay
from headstart.models.batch import Batch
from headstart.models.drafter import TrainableDrafter
from headstart.models.drafters.draft_lm import DraftLM, DraftLMConfig
from headstart.models.drafters.eagle1 import Eagle1, Eagle1Config
from headstart.models.drafters.eagle3 import Eagle3, Eagle3Config
from headstart.models.drafters.medusa import Medusa
from headstart.models.drafters.mtp import MTP
from headstart.models.drafters.mtp_layouts import MTPConfig
from headstart.models.losses import LossConfig
from headstart.models.parts.heads import HeadsConfig
from headstart.models.proposal.proposal import Drafting
from headstart.models.proposal.sampling import Sampling
from headstart.models.proposal.trees import cartesian, chain
from headstart.models.verifier.mimo import from_config
from headstart.models.verifier.verifier import Verifier

VOCAB, LENGTH, STEPS = 64, 12, 3
LOSS = LossConfig("hard_ce", num_steps=STEPS, gamma=1.0)
DRAFTING = Drafting(False, Sampling())
GREEDY = {"sampling": Sampling(), "drafting": DRAFTING, "max_new_tokens": LENGTH}
SHAPES = {"chain": chain(STEPS), "tree": cartesian(3, 2, 1)}
MOST_WEIGHTS = 50_000_000

DRAFTERS: dict[str, Callable[[Verifier], TrainableDrafter]] = {
    "eagle3": lambda v: Eagle3.create(v, Eagle3Config((1, 2)), LOSS, torch.ones(v.vocab_size)),
    "eagle1": lambda v: Eagle1.create(v, Eagle1Config("random", 0.0, 1.0), LOSS),
    "medusa": lambda v: Medusa.create(v, HeadsConfig(), LOSS, torch.ones(v.vocab_size)),
    "mtp": lambda v: MTP.create(v, MTPConfig(layout="glm4_moe"), LOSS),
    "draft_lm": lambda v: DraftLM.create(v, DraftLMConfig("layers:0"), LOSS),
}

IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TINY = {  # of which each family takes what it knows
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "sliding_window": 6,
    # experts
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
    "shared_expert_intermediate_size": 16, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "moe_k": 2, "num_experts_per_token": 2, "expert_ffn_hidden_size": 16, "moe_topk": 2,
    # latent attention
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "qk_head_dim": 16, "v_head_dim": 8,
    # other names for the same
    "ffn_hidden_size": 48, "decoder_layers": 2, "encoder_layers": 2, "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48, "ffn_dim": 48, "d_model": 32, "word_embed_proj_dim": 32,
    "decoder_attention_heads": 4, "encoder_attention_heads": 4, "rotary_dim": 4,
}  # fmt: skip
_VISION = {"depth": 2, "embed_dim": 32, "num_heads": 4, "out_hidden_size": 32, "num_layers": 2}
_LATENT = {"num_key_value_heads": 4, "head_dim": None}
_OF_LAYERS = {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8}
_PICTURES = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
}
_PARTIAL = {
    "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.1], "long_factor": [1.0, 9.0], "original_max_position_embeddings": 32,
}  # fmt: skip
EXTRA: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8},
    "gemma3n_text": _OF_LAYERS | {"num_kv_shared_layers": 0, "intermediate_size": [48, 48]},
    "gemma4": _OF_LAYERS,
    "gemma4_text": _OF_LAYERS,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "qwen2_5_vl": _PICTURES,
    "qwen2_vl": _PICTURES,
    "xlnet": {"d_head": 8},
    "zaya": {"num_experts_per_tok": 1},
} | dict.fromkeys(
    (
        "axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots3_note",
        "dots3_note_text", "glm4_moe_lite", "glm_moe_dsa", "minicpm3", "sarvam_mla", "youtu",
    ),
    _LATENT,
)  # fmt: skip
VARIANTS = {  # a family in a shape that needs a mention of its own
    "glm4_moe, heads that do not divide the width": {"num_attention_heads": 6},
    "phi3, longrope over a part of the head": {
        "rope_parameters": _PARTIAL, "original_max_position_embeddings": 32
    },
}  # fmt: skip
SEEING = (  # models that read images too, served for their language model
    "aria", "glm4v_moe", "idefics3", "internvl", "llava", "llava_next", "llava_onevision",
    "mistral3", "paligemma", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm",
)  # fmt: skip
NAMES = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *SEEING, *VARIANTS})


class NotMade(Exception):
    """No tiny model of this family without settings of its own, other packages, or pictures."""


def settings_of(part: PretrainedConfig, extra: dict[str, Any]) -> dict[str, Any]:
    known = {*part.to_dict(), *part.attribute_map}
    settings = {k: v for k, v in TINY.items() if k in known}
    if not part.to_dict().get("sliding_window"):
        settings.pop("sliding_window", None)
    return {k: v for k, v in (settings | IDS | extra).items() if v is not None}


def config_of(name: str) -> PretrainedConfig:
    family = name.split(",")[0]
    extra = EXTRA.get(family, {}) | VARIANTS.get(name, {})
    made_by = CONFIG_MAPPING[family]
    default = made_by()
    text = default.get_text_config()
    if text is default:
        return made_by(**settings_of(default, extra))
    parts = {}
    for field in default.sub_configs:
        part = getattr(default, field, None)
        if part is not None:
            own = settings_of(part, extra if part is text else {})
            if part is not text:
                own |= {k: v for k, v in _VISION.items() if k in part.to_dict()}
            parts[field] = own | {"model_type": part.model_type}
    return made_by(**parts, **IDS)


def model_of(name: str) -> PreTrainedModel:
    """A random model with weights large enough that its text neither loops nor ties.

    Raises:
        NotMade: it takes more than that.
    """
    try:
        config = config_of(name)
        with torch.device("meta"):
            made = from_config(config, torch.float32)
        if sum(weight.numel() for weight in made.parameters()) > MOST_WEIGHTS:
            raise NotMade("its smallest form here is large")
        torch.manual_seed(0)
        model = from_config(config, torch.float32).eval()
        with torch.no_grad():
            for own, weight in model.named_parameters():
                if weight.dim() >= 2:
                    weight.normal_(0, 1.0 if "embed" in own else 1.5 / weight.shape[-1] ** 0.5)
            model(input_ids=torch.tensor([PROMPTS[0]]), use_cache=False).logits.sum()
    except NotMade:
        raise
    except Exception as error:  # before anything of ours has run
        raise NotMade(str(error).strip().splitlines()[0] if str(error) else repr(error)) from error
    return model


@torch.no_grad()
def plain(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """Greedy decoding by the model itself, all of the text again for every token."""
    text = list(prompt)
    for _ in range(LENGTH):
        logits = model(input_ids=torch.tensor([text]), use_cache=False).logits
        text.append(int(logits[0, -1].argmax()))
    return text[len(prompt) :]


class Subject(NamedTuple):
    verifier: Verifier
    texts: list[list[int]]
    """What the model itself writes after `PROMPTS`."""

    @classmethod
    def of(cls, name: str) -> "Subject":
        """Raises:
        NotMade: there is no tiny model of it.
        ValueError: it is refused.
        """
        model = model_of(name)
        verifier = Verifier(model, tokenizer(VOCAB), f"tiny/{name}")
        verifier.terminator_ids = ()
        return cls(verifier, [plain(model, prompt) for prompt in PROMPTS])


def learn(drafter: TrainableDrafter, batch: Batch, count: int = 12) -> None:
    """So many steps, that some of the drafts are right."""
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    weights = drafter.loss.step_weights() / batch["loss_mask"].sum()
    drafter.train()
    for _ in range(count):
        optimizer.zero_grad()
        drafter(batch, weights).value.backward()
        optimizer.step()
    drafter.eval()


def refusal(subject: Subject, kind: str) -> str | None:
    """Train a drafter, decode with it and replay it. Why it was refused instead; None: it works.

    Raises:
        AssertionError: the text is not the verifier's, replay is not decoding, or nothing was ever
            accepted, which would show neither.
    """
    verifier, texts = subject
    torch.manual_seed(1)
    try:
        with contextlib.redirect_stdout(None):
            drafter = DRAFTERS[kind](verifier)
    except ValueError as error:
        return one_line(error)
    rows = [
        Row(prompt + text, [0] * len(prompt) + [1] * len(text), str(i))
        for i, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True))
    ]
    featurize = Featurizer(verifier, drafter.feature_layers)
    learn(drafter, featurize(collate(rows, 64, packed=True)))
    decoded = {}
    for name, shape in SHAPES.items():
        decoded[name] = generate(verifier, drafter, PROMPTS, shape=shape, **GREEDY)
        assert [output.tokens for output in decoded[name]] == texts, f"{name}: another text"
    batch = featurize(collate(rows, 64, packed=False))
    replayed = replay(drafter, [batch], STEPS, Sampling(), DRAFTING, LENGTH)
    for output, (counts,) in zip(decoded["chain"], replayed, strict=True):
        wanted = output.counts("row")
        for field in ("tokens", "rounds", "drafted", "examined", "accepted"):
            found = getattr(counts, field)
            assert found == getattr(wanted, field), f"replay: {field} is {found}, not {wanted}"
    assert sum(sum(output.accepted) for output in decoded["chain"]) > 0, "nothing was accepted"
    return None


def one_line(error: ValueError) -> str:
    message = str(error)
    assert "\n" not in message and 20 < len(message) < 600, message
    return message


# ---- the page ----------------------------------------------------------------------------------

BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"


def outcomes() -> Iterator[tuple[str, str | dict[str, str | None]]]:
    """Each family, and why it is refused, or, for each drafter, why that is, or None."""
    for name in NAMES:
        print(name, file=sys.stderr, flush=True)
        try:
            subject = Subject.of(name)
            yield name, {kind: refusal(subject, kind) for kind in DRAFTERS}
        except NotMade as error:
            yield name, f"not tried: {error}"
        except ValueError as error:
            yield name, one_line(error)


def short(reason: str, name: str) -> str:
    """A refusal as the table has it: without the name, and without the way out."""
    for lead in (f"verifier 'tiny/{name}': ", "drafter.init 'layers:0': ", "verifier "):
        reason = reason.removeprefix(lead)
    for own in (f"'tiny/{name}'", f"'a layer of tiny/{name}'", f"tiny/{name}"):
        reason = reason.replace(own, "a layer of it" if "layer" in own else "it")
    reason = reason.split("; ")[0].replace("|", "/")
    return reason if len(reason) < 200 else f"{reason[:200]} …"


def table() -> str:
    """The tables of works, works in part, refused, and not tried."""
    whole, part, refused, untried = [], [], [], []
    for name, outcome in outcomes():
        if isinstance(outcome, str):
            lines = untried if outcome.startswith("not tried: ") else refused
            lines.append(f"| {name} | {short(outcome.removeprefix('not tried: '), name)} |")
            continue
        reasons = {kind: reason for kind, reason in outcome.items() if reason}
        if not reasons:
            whole.append(name)
            continue
        works = ", ".join(kind for kind in DRAFTERS if kind not in reasons)
        why = "<br>".join(f"{kind}: {short(reason, name)}" for kind, reason in reasons.items())
        part.append(f"| {name} | {works} | {why} |")
    together = len(whole) + len(part)
    return "\n".join(
        [
            f"transformers {transformers.__version__}: {together} work, {len(refused)} do not.",
            "",
            f"All five drafters ({len(whole)}): {', '.join(whole)}.",
            "",
            f"Some of them ({len(part)}):",
            "",
            "| family | works | refused |",
            "|---|---|---|",
            *part,
            "",
            f"None of them ({len(refused)}):",
            "",
            "| family | why |",
            "|---|---|",
            *refused,
            "",
            f"Not tried, since no tiny model of them can be made on the spot ({len(untried)}):",
            "",
            "| family | why |",
            "|---|---|",
            *untried,
        ]
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    page = Path(sys.argv[1])
    before, rest = page.read_text().split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}")
