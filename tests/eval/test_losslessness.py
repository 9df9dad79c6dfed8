"""The chi-square test, and the naming of ties."""

import json
import math
from dataclasses import fields

import pytest
import torch
from tiny import save as save_verifier
from tiny import verifier

from headstart.eval import losslessness
from headstart.eval.decoding import prompts, rejection, speculate, trial
from headstart.eval.decoding.lossless import chi_square, compare, together
from headstart.eval.decoding.trial import prompt_of
from headstart.eval.decoding.typical import Typical
from headstart.eval.losslessness import Losslessness
from headstart.models.verifier.verifier import Verifier


def test_chi_square_is_pearsons():
    got = chi_square(torch.tensor([18.0, 55.0, 27.0]), torch.tensor([0.2, 0.5, 0.3]))
    assert got.statistic == pytest.approx(4 / 20 + 25 / 50 + 9 / 30, rel=1e-6)
    assert got.degrees == 2
    assert got.p_value == pytest.approx(math.exp(-1.0 / 2), rel=1e-6)  # closed form of two degrees


def test_p_value_of_one_degree_is_the_normal_tail():
    got = chi_square(torch.tensor([5200.0, 4800.0]), torch.tensor([0.5, 0.5]))
    assert got.p_value == pytest.approx(math.erfc(math.sqrt(16 / 2)), rel=1e-6)


def test_rare_outcomes_are_pooled():
    observed = torch.tensor([50.0, 47.0, 2.0, 0.0, 1.0])
    got = chi_square(observed, torch.tensor([0.5, 0.43, 0.025, 0.02, 0.025]))
    pooled = chi_square(torch.tensor([50.0, 47.0, 3.0]), torch.tensor([50.0, 43.0, 7.0]))
    assert got == pytest.approx(pooled) and got.degrees == 2


def test_a_pool_that_is_rare_itself_takes_in_the_next_outcome():
    got = chi_square([50, 30, 17, 2, 1], [0.5, 0.3, 0.17, 0.02, 0.01])
    assert got.degrees == 2 and got.statistic == pytest.approx(0)
    shifted = chi_square([50, 30, 13, 4, 3], [0.5, 0.3, 0.17, 0.02, 0.01])
    assert shifted.statistic == pytest.approx(0)  # within the pool


def test_an_impossible_outcome_gives_probability_zero():
    assert chi_square(torch.tensor([99.0, 1.0]), torch.tensor([1.0, 0.0])).p_value == 0.0
    assert chi_square(torch.tensor([99.0, 0.0]), torch.tensor([1.0, 0.0])).p_value == 1.0


def test_a_small_shift_is_seen_in_many_draws():
    law = torch.tensor([0.25, 0.25, 0.25, 0.25])
    shifted = torch.tensor([0.26, 0.25, 0.25, 0.24])
    assert chi_square(shifted * 200_000, law).p_value < 1e-10


def test_first_difference_is_a_tie_only_where_logits_are_close():
    model = verifier()
    prompt = [5, 9, 11]
    logits = model.logits(model.states(torch.tensor([prompt])).last_hidden[0, -1])
    first, second = logits.topk(2).indices.tolist()
    gap = float(logits[first] - logits[second])
    assert gap > 1e-4
    assert compare(model, prompt, [first, 3], [first, 3]) == "identical"
    assert compare(model, prompt, [first], [second]) == "different"
    assert compare(model, prompt, [first], [second], tolerance=gap * 1.01) == "tie"
    assert compare(model, prompt, [first, 3], [first]) == "different"


def test_equal_logits_are_a_tie_but_not_with_a_third_token():
    model = verifier()
    prompt = [5, 9, 11]
    best = int(model.logits(model.states(torch.tensor([prompt])).last_hidden[0, -1]).argmax())
    twin, other = (best + 1) % 64, (best + 2) % 64
    with torch.no_grad():
        model.head.weight[twin] = model.head.weight[best]
    assert compare(model, prompt, [best], [twin]) == "tie"
    assert compare(model, prompt, [best], [other]) == "different"


@pytest.mark.parametrize(
    "observed, expected, message",
    [([1.0], [1.0, 2.0], "two lists of one length"), ([-1.0, 2.0], [1.0, 1.0], "negative")],
)
def test_counts_that_cannot_be_tested_are_refused(observed, expected, message):
    with pytest.raises(ValueError, match=message):
        chi_square(observed, expected)


def test_tests_add_up():
    a, b = chi_square([18, 55, 27], [0.2, 0.5, 0.3]), chi_square([52, 48], [1, 1])
    both = together([a, b])
    assert both.statistic == pytest.approx(a.statistic + b.statistic) and both.degrees == 3
    impossible = chi_square([1, 1], [1, 0])
    assert together([a, impossible]).p_value == 0


# ---- the script --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A saved verifier and prompts with answers; few first tokens are likely."""
    folder = tmp_path_factory.mktemp("pair")
    made = verifier(num_hidden_layers=3)
    save_verifier(made, folder / "verifier")
    with (folder / "prompts.jsonl").open("w") as file:
        for i in range(4):
            user = {"role": "user", "content": f"w{i} w{3 * i + 1}"}
            answer = {"role": "assistant", "content": "w1 w2"}
            file.write(json.dumps({"id": str(i), "messages": [user, answer]}) + "\n")
    return folder


def settings_of(folder, **changes):
    given = {
        "drafter": "layers:0-1", "verifier": str(folder / "verifier"), "max_new_tokens": 12,
        "prompts": str(folder / "prompts.jsonl"), "samples": 600, "temperature": 1.0,
    }  # fmt: skip
    return Losslessness(**(given | changes))


def test_prompts_may_have_answers_or_not(pair, tmp_path):
    made = Verifier.load(str(pair / "verifier"))
    answered = prompts.read_prompts(made, str(pair / "prompts.jsonl"), 64)
    with (tmp_path / "prompts.jsonl").open("w") as file:
        for line in (pair / "prompts.jsonl").read_text().splitlines():
            row = json.loads(line)
            file.write(json.dumps({"id": row["id"], "messages": row["messages"][:1]}) + "\n")
    bare = prompts.read_prompts(made, str(tmp_path / "prompts.jsonl"), 64)
    assert [(r.id, prompt_of(r)) for r in bare] == [(r.id, prompt_of(r)) for r in answered]
    assert len(bare) == 4 and len(prompt_of(bare[0])) < len(answered[0].input_ids)
    assert losslessness.run(settings_of(pair, prompts=str(tmp_path / "prompts.jsonl"), samples=0))
    with pytest.raises(ValueError, match=r"nothing to continue, .* max_length = 2"):
        prompts.read_prompts(made, str(tmp_path / "prompts.jsonl"), 2)


@pytest.mark.parametrize("tree", ["static:2x2x1", "dynamic:depth=3,top_k=2,total=6"])
def test_a_lossless_pair_is_called_so(tree, pair, capsys):
    assert losslessness.run(settings_of(pair, tree=tree))
    said = capsys.readouterr().out
    assert "ties apart, and no sampled one contradicts its law." in said and tree in said
    assert said.count("| 4       | 4     | 0   | 0         |") == 2


@pytest.mark.parametrize("tree", [None, "static:2x2"])
def test_a_pair_with_a_wrong_rule_is_called_not_lossless(tree, pair, monkeypatch, capsys):
    monkeypatch.setattr(rejection, "accepts", lambda u, q, p: torch.ones_like(u, dtype=torch.bool))
    assert not losslessness.run(settings_of(pair, tree=tree))
    assert "NOT LOSSLESS: chain:4 at T = 1" in capsys.readouterr().out


@pytest.mark.parametrize("tree", [None, "static:2x2"])
def test_typical_acceptance_is_called_not_lossless(tree, pair, monkeypatch, capsys):
    right = trial.decode
    monkeypatch.setattr(trial, "decode", lambda *given: right(*given, acceptance=Typical()))
    assert not losslessness.run(settings_of(pair, tree=tree))
    said = capsys.readouterr().out
    assert "NOT LOSSLESS: chain:4 at T = 1" in said  # and equal at T = 0
    assert said.count("| 4       | 4     | 0   | 0         |") == 1 + (tree is not None)


def test_a_lossy_rule_cannot_be_asked_for():
    assert not [f.name for f in fields(Losslessness) if "acceptance" in f.name]


def test_too_few_samples_are_no_evidence(pair, capsys):
    assert losslessness.run(settings_of(pair, samples=20))
    assert "too few share a beginning to say anything: raise --samples" in capsys.readouterr().out


def test_greedy_text_of_another_model_is_called_not_lossless(pair, monkeypatch, capsys):
    right = speculate.verify_greedy

    def wrong(best, proposal, depth):
        """Right for plain decoding, which has no drafts."""
        return right(best ^ 1 if proposal.tokens.shape[1] else best, proposal, depth)

    monkeypatch.setattr(speculate, "verify_greedy", wrong)
    assert not losslessness.run(settings_of(pair, samples=0))
    assert "NOT LOSSLESS: chain:4." in capsys.readouterr().out


@pytest.mark.parametrize(
    "change, message",
    [({"temperature": 0.0}, "must be above 0"), ({"draft_length": 0}, "draft_length must be 1"),
     ({"samples": -1}, "samples must be 0 or more, got -1"), ({"tree": "x"}, "tree 'x': not known"),
     ({"seed": -3}, r"seed must be in \[0, 2\^63\), got -3"),
     ({"batch_size": 0}, "batch_size must be 1 or more, got 0")],
)  # fmt: skip
def test_settings_that_check_nothing_are_refused(change, message, pair):
    with pytest.raises(ValueError, match=message):
        settings_of(pair, **change)
