"""The one decoder against an independent implementation of each family: transformers, and llama.cpp over GGUF files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from paceline.cloud.architecture import from_hugging_face
from paceline.cloud.engines.torch import TorchEngine
from paceline.cloud.torch_target import Options, bring_up
from paceline.cloud.witness import row_logits
from paceline.protocol.cloud_session import Plan
from paceline.protocol.errors import EngineError
from small_models import BASE, CONFIGS, config_of, random_tensors, write_folder

OPTIONS = Options(device="cpu", cache_bytes=2**22, free_width=0)


def logits_of(engine: TorchEngine, tokens: list[int]) -> torch.Tensor:
    """Logits [len, V] after every token: the first through a chain of nodes, so that every row is asked for."""
    chain = Plan(tuple(range(len(tokens) - 1)), tuple(tokens[1:]), tuple(range(-1, len(tokens) - 2)))
    return row_logits(engine, [(tokens[:1], chain)], [0])


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
def test_logits_equal_those_of_transformers(family: str, exact: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_folder(tmp_path, family)
    config = transformers.AutoConfig.from_pretrained(folder, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    missing = model.load_state_dict(random_tensors(config_of(family), 0), strict=False).missing_keys
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    tokens = np.random.default_rng(1).integers(0, 150, 150).tolist()
    with torch.no_grad():
        theirs = model(torch.tensor([tokens])).logits[0, :, :150]
    ours = logits_of(bring_up(folder, Options(**{**vars(OPTIONS), "exact": exact})), tokens)
    assert theirs.std() > 0.5, "a test on flat logits would show nothing"
    torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def test_a_window_matters(tmp_path: Path) -> None:
    """The families test would not see a missing window if the text were shorter: check that it shows."""
    tokens = np.random.default_rng(1).integers(0, 150, 150).tolist()
    windowed = logits_of(bring_up(write_folder(tmp_path / "a", "mistral"), OPTIONS), tokens)
    folder = write_folder(tmp_path / "b", "mistral")
    (folder / "config.json").write_text(json.dumps({**config_of("mistral"), "sliding_window": None}))
    endless = logits_of(bring_up(folder, OPTIONS), tokens)
    torch.testing.assert_close(windowed[:24], endless[:24], rtol=1e-4, atol=1e-4)
    assert (windowed[60:] - endless[60:]).abs().max() > 0.1


def llamacpp_logits(path: Path, tokens: list[int]) -> torch.Tensor:
    llama_cpp = pytest.importorskip("llama_cpp")
    llama = llama_cpp.Llama(str(path), n_ctx=256, n_threads=2, logits_all=True, verbose=False)
    llama.eval(tokens)
    return torch.from_numpy(np.array(llama.scores[: len(tokens)]))


def compare_with_llamacpp(path: Path, tokens: list[int], median: float, agreement: float) -> None:
    """llama.cpp rounds activations to 8 bits, so the two differ; that they are the same model shows in how little."""
    theirs = llamacpp_logits(path, tokens)
    ours = logits_of(bring_up(path, Options(device="cpu", cache_bytes=2**26, free_width=0, context=256)), tokens)
    difference = (ours - theirs[:, : ours.shape[1]]).abs()
    assert difference.median() < median, difference.median()
    assert (ours.argmax(-1) == theirs.argmax(-1)).float().mean() >= agreement


def test_smollm2_gguf_agrees_with_llamacpp(smollm2_path: Path) -> None:
    tokens = [
        1,
        4093,
        198,
        1780,
        314,
        260,
        3575,
        282,
        4649,
        47,
        2,
        198,
        1,
        520,
        9531,
        198,
        504,
        3575,
        282,
        4649,
        314,
        7042,
    ]
    compare_with_llamacpp(smollm2_path, tokens, median=0.3, agreement=0.9)


@pytest.mark.slow
def test_gemma3_gguf_agrees_with_llamacpp(gemma3_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    vocabulary = llama_cpp.Llama(str(gemma3_path), vocab_only=True, verbose=False)
    text = b"The river rises in the mountains and flows north to the sea. Its water is cold, and the towns along it are old."
    compare_with_llamacpp(gemma3_path, vocabulary.tokenize(text), median=0.5, agreement=0.85)


# ---- configurations


def test_old_and_new_spellings_of_rotary_settings_mean_the_same() -> None:
    new = from_hugging_face(config_of("llama3"))
    rope = dict(CONFIGS["llama3"]["rope_parameters"])
    theta = rope.pop("rope_theta")
    old = from_hugging_face({**BASE, "model_type": "llama", "rope_theta": theta, "rope_scaling": rope})
    assert old == new


def test_gemma_windows_come_from_the_period_where_no_layer_types_are_given() -> None:
    config = {**config_of("gemma3"), "num_hidden_layers": 7}
    del config["layer_types"], config["sliding_window_pattern"]
    assert from_hugging_face(config).windows == (20, 20, 20, 20, 20, 0, 20)


def test_qwen_windows_start_at_max_window_layers() -> None:
    config = {**config_of("qwen2"), "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    assert from_hugging_face(config).windows == (0, 8, 8)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"num_attention_heads": 3}, "3 query heads"),
        ({"num_hidden_layers": 0}, "not positive"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change: dict[str, Any], says: str) -> None:
    with pytest.raises(EngineError, match=says):
        from_hugging_face({**config_of("llama2"), **change})


def test_a_config_without_a_size_is_refused() -> None:
    config = config_of("llama2")
    del config["hidden_size"]
    with pytest.raises(EngineError, match="hidden_size"):
        from_hugging_face(config)
