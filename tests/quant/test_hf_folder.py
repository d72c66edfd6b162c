"""Hugging Face folders: the same model from either format gives the same draft; broken folders are refused."""

import json
import struct
from pathlib import Path

import pytest
import torch
from paceline.kernels.gguf_file import GgufFile
from paceline.quant import factory, folder
from paceline.quant.build import halves
from paceline.quant.errors import WeightsError
from paceline.quant.hf_folder import safetensors_table
from paceline.quant.target import GgufTarget, open_target
from safetensors.torch import save_file

NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
NAMES |= {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
NAMES |= {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}


@pytest.fixture
def hf(tiny: Path, tmp_path: Path) -> Path:
    """The tiny target as a Hugging Face folder, its queries and keys in that order of rotation."""
    target, out = open_target(tiny), tmp_path / "tiny-hf"
    out.mkdir()
    tensors = {
        "model.embed_tokens.weight": target.tensor("token_embd.weight"),
        "model.norm.weight": target.tensor("output_norm.weight"),
    }
    for i in range(target.shape.layers):
        for own, theirs in NAMES.items():
            w = target.tensor(f"blk.{i}.{own}.weight")
            tensors[f"model.layers.{i}.{theirs}.weight"] = halves(w, 16) if own in ("attn_q", "attn_k") else w
    save_file({n: t.contiguous() for n, t in tensors.items()}, out / "model.safetensors")
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
    }
    (out / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5, "rope_theta": 10_000.0}))
    vocab = {token: i for i, token in enumerate(target.tokens)}
    (out / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab, "merges": []}, "added_tokens": []}))
    return out


def test_a_folder_gives_the_same_draft_as_the_gguf(hf: Path, tiny: Path, tmp_path: Path) -> None:
    options = factory.Options(quant="q4_0", rounding="plain")
    factory.build(hf, tmp_path / "a", options)
    factory.build(tiny, tmp_path / "b", options)
    a, b = GgufFile(tmp_path / "a" / "draft.gguf"), GgufFile(tmp_path / "b" / "draft.gguf")
    assert set(a.tensors) == set(b.tensors)
    for name in a.tensors:
        assert (a.raw(name) == b.raw(name)).all(), name
    card = folder.verify(tmp_path / "a")
    assert isinstance(open_target(tiny), GgufTarget)
    assert card.target["fingerprint"] == folder.read_card(tmp_path / "b").target["fingerprint"]


def write_safetensors(path: Path, header: bytes, data: bytes = b"") -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[1, 2]",
        b'{"t": 3}',
        b'{"t": {"dtype": "F32", "shape": [4], "data_offsets": [0, 99999]}}',
        b'{"t": {"dtype": "F32", "shape": [4], "data_offsets": [-4, 12]}}',
        b'{"t": {"dtype": "F32", "shape": [1099511627776, 1099511627776], "data_offsets": [0, 16]}}',
        b'{"t": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 16]}}',
        b'{"t": {"dtype": "F32", "shape": [4]}}',
    ],
)
def test_hostile_safetensors_are_refused(header: bytes, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"m\.safetensors"):
        safetensors_table(write_safetensors(tmp_path / "m.safetensors", header, bytes(16)))


@pytest.mark.parametrize("size", [0, 4, 8])
def test_cut_safetensors_are_refused(size: int, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 50)[:size])
    with pytest.raises(WeightsError, match=r"m\.safetensors"):
        safetensors_table(path)


def test_a_folder_whose_tensors_belie_its_config_is_refused(hf: Path) -> None:
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps(config | {"hidden_size": 128}))
    with pytest.raises(WeightsError, match="its header promises"):
        open_target(hf)
    (hf / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    with pytest.raises(WeightsError, match="mamba"):
        open_target(hf)
    save_file({"model.norm.weight": torch.ones(64)}, hf / "model.safetensors")
    (hf / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match="has no tensor"):
        open_target(hf)
