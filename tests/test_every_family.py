"""Every causal family of transformers: each drafter works on it, or is refused in our words.

What works: greedy text, of a chain and of a tree, is what the model itself writes, and replay
counts what decoding counts. What is refused is refused by a ValueError before anything is computed.
"""

from functools import cache
from pathlib import Path

import pytest
import transformers
from families import DRAFTERS, NAMES, NotMade, Subject, one_line, refusal

PAGE = Path(__file__).parents[1] / "docs" / "verifiers.md"
NEW_WORK = [  # each was a traceback, or a replay that was not decoding
    ("cohere2_moe", "eagle3"),
    ("diffllama", "mtp"),
    ("emu3", "mtp"),
    ("falcon", "mtp"),
    ("gemma4_unified_text", "eagle1"),
    ("gemma4_unified_text", "mtp"),
    ("glm4_moe, heads that do not divide the width", "eagle3"),
    ("gpt2", "eagle3"),
    ("gpt_bigcode", "eagle1"),
    ("gptj", "eagle3"),
    ("llava", "eagle1"),
    ("mistral3", "draft_lm"),
    ("nanochat", "mtp"),
    ("olmo", "mtp"),
    ("opt", "eagle1"),
    ("phi3, longrope over a part of the head", "eagle3"),
    ("qwen2_vl", "eagle3"),
    ("qwen3_vl", "mtp"),
    ("solar_open", "eagle1"),
]
NEW_REFUSALS = [
    ("gemma3n_text", "eagle3", "states of shape"),
    ("gemma4_text", "mtp", "cannot be run on its own"),
    ("gpt_neox_japanese", "draft_lm", "made otherwise by their place"),
    ("dory", None, "cannot read a text in two passes"),
    ("gpt_neo", None, "layers of kind local"),
    ("moshi", None, "sees other tokens before a token than its config says"),
    ("xlm", None, "cannot read a text in two passes"),
]


@cache
def subject(name: str) -> Subject:
    try:
        return Subject.of(name)
    except NotMade as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("family, kind", NEW_WORK)
def test_a_drafter_works_on_a_family_with_something_of_its_own(family: str, kind: str) -> None:
    assert refusal(subject(family), kind) is None


@pytest.mark.parametrize("family, kind, reason", NEW_REFUSALS)
def test_what_cannot_be_drafted_for_is_refused_by_name(
    family: str, kind: str | None, reason: str
) -> None:
    if kind is None:
        with pytest.raises(ValueError, match=rf"^verifier 'tiny/{family}': .*{reason}") as caught:
            subject(family)
        one_line(caught.value)
    else:
        assert reason in refusal(subject(family), kind)


@pytest.mark.slow
@pytest.mark.parametrize("family", NAMES)
def test_every_family_works_or_is_refused_by_name(family: str) -> None:
    try:
        of_family = subject(family)
    except ValueError as error:
        one_line(error)
        return
    assert {kind: refusal(of_family, kind) for kind in DRAFTERS}


@pytest.mark.slow
def test_the_page_is_of_this_transformers_and_names_every_family() -> None:
    """python tests/support/families.py docs/verifiers.md writes it anew."""
    text = PAGE.read_text(encoding="utf-8")
    if f"transformers {transformers.__version__}: " not in text:
        pytest.skip("the page is of another release of transformers")
    assert [name for name in NAMES if name not in text] == []
