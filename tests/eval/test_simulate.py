"""The simulation without a model: its laws, the real rule on them, and what it prints."""

import math
import subprocess
import sys

import pytest
import torch

from headstart.eval import simulate
from headstart.eval.measures.speedup import expected_tokens_per_verify
from headstart.eval.simulate import (
    Simulation,
    acceptance_length,
    emit_afresh,
    first_token_test,
    overlapping_laws,
    play,
    run,
    tail_part,
    tree_part,
)
from headstart.script import ROOT, run_script

ALPHAS = [round(0.1 * i, 1) for i in range(1, 11)]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- laws --------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [2, 3, 32, 1001])
@pytest.mark.parametrize("alpha", [1e-6, 0.01, 0.5, 0.75, 0.999, 1.0])
def test_overlap_is_alpha(vocab, alpha):
    for seed in range(5):
        q, p = overlapping_laws(vocab, alpha, generator(seed))
        assert float(torch.minimum(q, p).sum()) == pytest.approx(alpha, abs=1e-9)
        for law in (q, p):
            assert float(law.sum()) == pytest.approx(1, abs=1e-12) and bool((law > 0).all())
    assert torch.equal(q, p) == (alpha == 1)


def test_laws_are_random():
    first, second = (overlapping_laws(32, 0.75, generator(seed)) for seed in (0, 1))
    assert not torch.allclose(first[0], second[0]) and not torch.allclose(first[1], second[1])


# ---- the rule ----------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("k", [1, 4, 8])
def test_simulated_acceptance_length_is_the_closed_form(alpha, k):
    samples = 10_000
    q, p = overlapping_laws(8, alpha, generator(11))
    accepted = play(q, p, k, samples, generator(17)).accepted
    law = [alpha**i * (1 - alpha if i < k else 1) for i in range(k + 1)]
    mean = sum(i * share for i, share in enumerate(law))
    deviation = math.sqrt(sum((i - mean) ** 2 * share for i, share in enumerate(law)))
    assert 1 + mean == pytest.approx(expected_tokens_per_verify(alpha, k))
    # 4 standard errors: 1 in 16,000 by chance
    assert abs(float(accepted.double().mean()) - mean) <= 4 * deviation / math.sqrt(samples)
    assert accepted.shape == (samples,) and 0 <= int(accepted.min()) <= int(accepted.max()) <= k


@pytest.mark.parametrize("vocab", [2, 32, 300])
@pytest.mark.parametrize("alpha", [0.2, 0.75, 0.95])
def test_the_rule_follows_q_and_the_wrong_one_is_caught(vocab, alpha):
    q, p = overlapping_laws(vocab, alpha, generator(3))
    right = play(q, p, 3, 20_000, generator(5))
    wrong = play(q, p, 3, 20_000, generator(5), emit_afresh)
    assert torch.equal(right.accepted, wrong.accepted)  # wrong in the token alone
    assert first_token_test(right, q).p_value > 0.001
    assert first_token_test(wrong, q).p_value < (1e-6 if alpha < 0.9 else 0.001)


def test_the_wrong_rule_emits_what_it_says():
    """min(q, p) from drafts, and q in place of (q − p)+ for the rest."""
    q, p = overlapping_laws(16, 0.5, generator(3))
    wrong = play(q, p, 2, 40_000, generator(5), emit_afresh)
    assert first_token_test(wrong, torch.minimum(q, p) + 0.5 * q).p_value > 0.001


def test_equal_laws_accept_everything():
    q, p = overlapping_laws(16, 1.0, generator())
    rounds = play(q, p, 5, 5000, generator())
    assert bool((rounds.accepted == 5).all())
    assert first_token_test(rounds, q).p_value > 0.001


@pytest.mark.parametrize("chunk", [1, 8 * 3 * 4, 2**20])
def test_chunks_bound_memory_and_lose_no_round(monkeypatch, chunk):
    widest = []

    def watched(q, drafts, lengths, uniform, p):
        widest.append(len(q))
        return simulate.verify_chain(q, drafts, lengths, uniform, p)

    monkeypatch.setattr(simulate, "_CHUNK", chunk)
    q, p = overlapping_laws(8, 0.5, generator())
    rounds = play(q, p, 3, 11, generator(), watched)
    assert rounds.accepted.shape == rounds.first.shape == (11,)
    assert (max(widest), sum(widest)) == ({1: 1, 8 * 3 * 4: 4, 2**20: 11}[chunk], 11)


def test_a_test_of_too_few_rounds_is_none():
    def rounds(count: int) -> simulate.Rounds:
        return simulate.Rounds(torch.zeros(count), torch.arange(count) % 2)

    law = torch.tensor([0.5, 0.5], dtype=torch.double)
    assert first_token_test(rounds(9), law) is None  # 4.5 each
    assert first_token_test(rounds(10), law).degrees == 1
    law = torch.tensor([0.5, 0.44, 0.03, 0.03], dtype=torch.double)
    assert first_token_test(rounds(80), law).degrees == 1  # a pool of 4.8 takes in the next
    assert first_token_test(rounds(100), law).degrees == 2


# ---- the interval ------------------------------------------------------------------------------


def test_interval_is_that_of_the_known_law():
    got = acceptance_length(torch.tensor([0, 1, 2, 2]), 0.5, 2)  # shares 1/2, 1/4, 1/4
    assert (got.simulated, got.closed_form) == (2.25, 1.75)
    deviation = math.sqrt(0.5 * 0.75**2 + 0.25 * 0.25**2 + 0.25 * 1.25**2)
    assert (got.high - got.low) / 2 == pytest.approx(1.96 * deviation / 2)
    assert got.agree
    assert not acceptance_length(torch.full((100,), 2), 0.5, 2).agree


def test_interval_of_one_round_is_wide_and_of_equal_laws_a_point():
    assert acceptance_length(torch.tensor([0]), 0.5, 4).agree
    assert acceptance_length(torch.tensor([3, 3]), 1.0, 3) == (4, 4, 4, 4)
    assert acceptance_length(torch.tensor([3, 3]), 1.0, 3).agree
    assert not acceptance_length(torch.tensor([3, 2]), 1.0, 3).agree


# ---- what is printed ---------------------------------------------------------------------------


TREE = """
node parent root a b c d e f
root -        x  . . . . . .
a    root     x  x . . . . .
b    root     x  . x . . . .
c    a        x  x . x . . .
d    a        x  x . . x . .
e    b        x  . x . . x .
f    c        x  x . x . . x
"""


def test_tree_is_drawn_with_ancestors_alone():
    title, *drawing = tree_part().splitlines()
    assert "(-1, -1, 0, 0, 1, 2)" in title
    assert [line.split() for line in drawing] == [line.split() for line in TREE.splitlines()]


def test_tail_says_what_a_round_costs_and_where_it_breaks_even():
    assert "no α: the overhead is above K = 2" in tail_part(
        Simulation(k=2, c=0.5, verify_overhead=2)
    )
    text = tail_part(Simulation(alpha=0.25, k=2, c=0.1, verify_overhead=0.3))
    assert "1 + 2·0.1 + 0.3 = 1.5" in text and "75 % of rounds reject" in text
    with_drafting = next(line for line in text.splitlines() if "with drafting" in line).split()
    assert with_drafting[-3:] == ["1.500", "1.500", "1.500"]
    assert "without              1.000   1.000   1.000   1.000" in text
    rate = (math.sqrt(1 + 4 * 0.5) - 1) / 2  # α + α² = 0.5
    assert f"break-even at α = {rate:.3f}" in text


def exit_code(monkeypatch: pytest.MonkeyPatch, *words: str) -> int | None:
    monkeypatch.setattr(sys, "argv", ["eval/simulate.py", *words])
    try:
        run_script(Simulation, run)
    except SystemExit as stop:
        return stop.code
    return None


@pytest.mark.parametrize(
    "words, said",
    [
        (["--alpha", "0.75"], "follows q"),
        (["--alpha", "1"], "not caught: at α = 1 nothing is rejected"),
        (["--alpha", "0.9999"], "not caught: too few samples, or α too near 1"),
        (["--samples", "1"], "too few samples to say; --samples "),
        (["--alpha", "1e-300"], "follows q"),
        (["--vocab", "2", "--k", "1", "--alpha", "0.3"], "follows q"),
    ],
)
def test_it_says_what_the_test_can_show(monkeypatch, capsys, words, said):
    assert exit_code(monkeypatch, "--samples", "4000", *words) is None
    out = capsys.readouterr().out
    assert said in out and "DOES NOT" not in out
    assert len(out.splitlines()) <= 50


def test_the_samples_it_asks_for_are_enough(monkeypatch, capsys):
    exit_code(monkeypatch, "--samples", "20")
    needed = capsys.readouterr().out.split("--samples ")[1].split()[0]
    assert exit_code(monkeypatch, "--samples", needed) is None
    assert "follows q" in capsys.readouterr().out


def test_a_rule_that_fails_is_said_plainly_and_ends_with_code_1(monkeypatch, capsys):
    def always_token_0(q, drafts, lengths, uniform, p):
        return torch.zeros_like(lengths), torch.zeros_like(lengths)

    monkeypatch.setattr(simulate, "verify_chain", always_token_0)
    assert exit_code(monkeypatch, "--samples", "2000") == 1
    out = capsys.readouterr().out
    assert "DOES NOT FOLLOW q" in out and "The rule fails its test" in out
    assert "4. Time between tokens" in out  # the rest is shown all the same


def test_it_follows_its_seed(monkeypatch, capsys):
    outs = []
    for seed in ("1", "1", "2"):
        assert exit_code(monkeypatch, "--samples", "500", "--vocab", "8", "--seed", seed) is None
        outs.append(capsys.readouterr().out)
    assert outs[0] == outs[1] != outs[2]


@pytest.mark.parametrize(
    "words, said",
    [
        (["--vocab", "1"], "vocab must be in [2, 1000000], got 1"),
        (["--vocab", "2000000000"], "vocab must be in"),
        (["--vocab", "32.5"], "vocab: Expected a int"),
        (["--alpha", "0"], "alpha must be in (0, 1], got 0"),
        (["--alpha", "1.1"], "alpha must be in (0, 1], got 1.1"),
        (["--alpha", ".nan"], "alpha must be in (0, 1], got nan"),
        (["--alpha", "nan"], "alpha: Expected a float"),
        (["--alpha", "high"], "alpha: Expected a float"),
        (["--k", "0"], "k must be in [1, 100], got 0"),
        (["--samples", "0"], "samples must be in [1, 1000000000], got 0"),
        (["--samples", "1000000000000"], "samples must be in [1, 1000000000]"),
        (["--c", "-0.1"], "c must be in [0, 1000], got -0.1"),
        (["--verify_overhead", ".inf"], "verify_overhead must be in [0, 1000], got inf"),
        (["--seed", "-1"], "seed must be in [0, 2^63), got -1"),
        (["--sample", "5"], "did you mean 'samples'"),
        (["--alhpa", "0.5"], "did you mean 'alpha'"),
        (["7"], "unrecognized arguments: 7"),
    ],
)
def test_bad_input_is_one_line_and_code_2(monkeypatch, capsys, words, said):
    assert exit_code(monkeypatch, *words) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("error: ") and said in captured.err


# ---- main.py -----------------------------------------------------------------------------------


def main(*words: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    command = [sys.executable, *flags, str(ROOT / "main.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8")


def test_main_shows_the_four_parts():
    done = main("--vocab", "64", "--alpha", "0.75", "--k", "4", "--samples", "5000")
    assert (done.returncode, done.stderr) == (0, "")
    headings = [line[:2] for line in done.stdout.splitlines() if line[:1].isdigit()]
    assert headings == ["1.", "2.", "3.", "4."]
    assert "5,000 rounds of 4 drafts from p; 64 tokens, Σ min(q, p) = 0.75" in done.stdout


def test_main_without_the_package_says_so_in_one_line():
    done = main(flags=("-E", "-S"))  # no site-packages
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and "pip install -e ." in done.stderr
    assert done.stderr.startswith("error: headstart is not installed")
