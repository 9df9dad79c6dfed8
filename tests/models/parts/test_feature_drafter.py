"""The shape and positions of a Llama layer for verifiers that are no Llamas."""

import pytest
from tiny import verifier as tiny_verifier
from transformers import LlamaConfig, PretrainedConfig

from headstart.models.parts.feature_drafter import heads_of, llama_config, rope_of

PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
THETA = {"rope_type": "default", "rope_theta": 5e5}
YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0}
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 3, "long_factor": [2.0] * 3,
}  # fmt: skip


def config(**fields: object) -> PretrainedConfig:
    made = PretrainedConfig()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    "width, heads, kv_heads, head_dim, expected",
    [
        (4096, 32, 8, 128, (32, 8, 128)),
        (4096, 96, 8, 128, (32, 8, 128)),  # GLM-4.5-Air
        (5120, 96, 8, 128, (40, 8, 128)),  # GLM-4.5
        (2048, 32, 4, 128, (32, 4, 128)),  # Qwen3-MoE: heads wider than the stream
        (768, 12, None, None, (12, 12, 64)),  # GPT-2
        (2880, 64, 8, 64, (64, 8, 64)),
        (7168, 128, 128, None, (128, 128, 56)),
        (100, 7, 3, 16, (5, 1, 16)),
        (36, 4, 4, None, (4, 4, 10)),  # a rotary head is even
    ],
)
def test_heads_are_the_verifiers_as_far_as_they_divide_the_width(
    width: int, heads: int, kv_heads: int | None, head_dim: int | None, expected: tuple
) -> None:
    found = heads_of(
        config(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim), width
    )
    assert found == expected
    heads, kv_heads, head_dim = found
    LlamaConfig(hidden_size=width, num_attention_heads=heads, num_key_value_heads=kv_heads,
                head_dim=head_dim)  # fmt: skip # as an engine would make it


@pytest.mark.parametrize(
    "rope, expected",
    [
        (None, PLAIN),
        (THETA, THETA),
        (THETA | {"partial_rotary_factor": 0.5}, THETA),
        (YARN, YARN),
        (THETA | {"mrope_section": [1, 1, 2]}, THETA),  # of pictures
        ({"full_attention": YARN, "sliding_attention": THETA}, YARN),
        ({"sliding_attention": THETA}, THETA),
        (LONG, LONG),
        (LONG | {"short_factor": [1.0], "long_factor": [2.0]}, PLAIN),  # of a part of the head
    ],
)
def test_positions_are_the_verifiers_as_far_as_whole_heads_can_have_them(
    rope: dict | None, expected: dict
) -> None:
    assert rope_of(config(rope_parameters=rope), head_dim=6) == expected
    assert rope_of(PretrainedConfig(), head_dim=6) == PLAIN


def test_what_a_config_leaves_out_is_the_usual() -> None:
    """GPT-2's says nothing of the inner width, of norms or of rotary positions."""
    made = tiny_verifier("gpt2", num_key_value_heads=None, head_dim=None, intermediate_size=None)
    found = llama_config(made)
    assert (found.hidden_size, found.intermediate_size) == (32, 128)
    assert (found.num_attention_heads, found.head_dim, found.rms_norm_eps) == (4, 8, 1e-5)
    assert found.max_position_embeddings == 512
