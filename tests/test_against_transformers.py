"""Beside assisted generation of transformers: the same pair, prompts and draft length, greedy.

    make test-slow PYTEST_ARGS='-s tests/test_against_transformers.py'

prints the ratio of the two loops' times, interleaved in one run.
"""

import time

import pytest
import torch

from headstart.data.rows.rendering import render_all
from headstart.eval.decoding.speculate import generate
from headstart.eval.decoding.trial import pick, prompt_of
from headstart.models.drafters.draft_lm import DraftLM, cut
from headstart.models.losses import LossConfig
from headstart.models.proposal.proposal import Drafting
from headstart.models.proposal.sampling import Sampling
from headstart.models.proposal.trees import chain
from headstart.models.verifier.verifier import Verifier

LENGTH, TOKENS = 3, 48


@pytest.mark.slow
@torch.no_grad()
def test_the_same_text_as_assisted_generation_and_how_fast():
    verifier = Verifier.load("embedded/smollm2-135m")
    lm = cut(verifier, tuple(range(6)))
    drafter = DraftLM(lm, verifier, LossConfig())
    rows, _ = render_all(
        "data/smollm2/eval.jsonl", verifier.tokenizer, verifier.terminator_ids, 1024
    )
    prompts = [prompt_of(row) for row in pick(rows, 12)]
    assistant = lm.model.generation_config
    assistant.num_assistant_tokens = LENGTH
    assistant.num_assistant_tokens_schedule = "constant"
    assistant.assistant_confidence_threshold = 0.0
    settings = {"shape": chain(LENGTH), "sampling": Sampling(),
                "drafting": Drafting(False, Sampling()), "max_new_tokens": TOKENS}  # fmt: skip
    ours, theirs = 0.0, 0.0
    for number, prompt in enumerate([prompts[0], *prompts]):
        began = time.perf_counter()
        (got,) = generate(verifier, drafter, [prompt], **settings)
        between = time.perf_counter()
        made = verifier.model.generate(
            torch.tensor([prompt]), assistant_model=lm.model, do_sample=False,
            max_new_tokens=TOKENS, attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            eos_token_id=list(verifier.terminator_ids),
        )  # fmt: skip
        if number:  # the first is a warm-up
            ours += between - began
            theirs += time.perf_counter() - between
        assert got.tokens == made[0, len(prompt) :].tolist()
    print(f"\nassisted generation / our loop: {theirs / ours:.2f} (K = {LENGTH}, 12 prompts)")
