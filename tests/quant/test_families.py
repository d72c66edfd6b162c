"""What a header says of a model's shape: read with its defaults, refused where it cannot be."""

import numpy as np
import pytest
from paceline.quant.errors import WeightsError
from paceline.quant.families import draft_shape, gguf_shape, hf_shape

HEADER = {
    "general.architecture": "llama",
    "llama.embedding_length": 64,
    "llama.block_count": 2,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
}


def test_what_is_not_said_has_a_default() -> None:
    for shape in (gguf_shape(HEADER, "m"), hf_shape(CONFIG, "m"), draft_shape(HEADER, "m")):
        assert (shape.heads, shape.kv_heads, shape.head_dim, shape.rope_base) == (4, 4, 16, 10_000.0)
    assert hf_shape(CONFIG | {"head_dim": None}, "m").head_dim == 16


@pytest.mark.parametrize("value", [0, -1, 1e12, "many", True, None, [2, 2], float("nan")])
@pytest.mark.parametrize("key", ["attention.head_count_kv", "attention.key_length", "rope.freq_base", "block_count"])
def test_numbers_that_cannot_be_are_refused(key: str, value: object) -> None:
    with pytest.raises(WeightsError, match=rf"m does not state a usable 'llama\.{key}'"):
        gguf_shape(HEADER | {f"llama.{key}": value}, "m")


@pytest.mark.parametrize("value", [0, -1, 1e12, "many", True, [2, 2]])
@pytest.mark.parametrize("key", ["num_key_value_heads", "head_dim", "rope_theta", "hidden_size"])
def test_nor_are_those_of_a_folder(key: str, value: object) -> None:
    with pytest.raises(WeightsError, match=f"m does not state a usable '{key}'"):
        hf_shape(CONFIG | {key: value}, "m")


def test_a_draft_whose_layers_differ_has_the_most_that_any_has() -> None:
    mixed = {key.replace("llama.", "deci.", 1): value for key, value in HEADER.items()}
    mixed |= {"general.architecture": "deci", "deci.attention.key_length": 16}
    heads = {"deci.attention.head_count": np.array([2, 0]), "deci.attention.head_count_kv": np.array([1, 0])}
    shape = draft_shape(mixed | heads, "m")
    assert (shape.heads, shape.kv_heads, shape.head_dim) == (2, 1, 16)
    with pytest.raises(WeightsError, match="architecture 'deci'"):
        gguf_shape(mixed | heads, "m")  # no target is of that kind
    with pytest.raises(WeightsError, match="does not state a usable"):
        draft_shape(mixed | {name: np.zeros(2, np.int32) for name in heads}, "m")
