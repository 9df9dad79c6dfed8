"""An answer as an engine's steps bring it."""

from headstart.eval.engines.parity import (
    Answer,
)


def in_steps(answer: Answer, limit: int) -> list[list[int]]:
    """As vLLM hands the tokens out: round by round, and none past the limit."""
    steps, at = [answer.tokens[:1]], 1
    for accepted in answer.accepted:
        steps.append(answer.tokens[at : min(at + accepted + 1, limit)])
        at += accepted + 1
    return steps
