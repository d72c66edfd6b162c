"""Weights on disk: what is read, and what is said of files that are missing, cut short, or do not belong together."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from paceline.cloud.checkpoint import open_checkpoint
from paceline.cloud.torch_target import Options, bring_up, pick_device
from paceline.cloud.witness import row_logits
from paceline.protocol.cloud_session import Plan
from paceline.protocol.errors import EngineError
from safetensors.torch import load_file, save_file
from small_models import config_of, random_tensors, write_folder

OPTIONS = Options(device="cpu", cache_bytes=2**22, free_width=0)
TEXT = [([1, 5, 9, 140, 77, 3], Plan())]


def shard(folder: Path) -> None:
    """Split the only file of a model into two, with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for part, own in enumerate((names[::2], names[1::2])):
        file = f"model-{part}.safetensors"
        save_file({n: tensors[n] for n in own}, folder / file)
        weight_map |= dict.fromkeys(own, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards_read_as_the_whole_does(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "llama3")
    whole = row_logits(bring_up(folder, OPTIONS), TEXT, [0])
    shard(folder)
    assert torch.equal(row_logits(bring_up(folder, OPTIONS), TEXT, [0]), whole)


def test_tensors_may_have_a_prefix_as_multimodal_models_give_them(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "gemma3")
    whole = row_logits(bring_up(folder, OPTIONS), TEXT, [0])
    tensors = load_file(folder / "model.safetensors")
    save_file({f"language_model.{n}": t for n, t in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": config}))
    assert torch.equal(row_logits(bring_up(folder, OPTIONS), TEXT, [0]), whole)


def write_gguf(path: Path, family: str, types: Mapping[str, npt.DTypeLike] = MappingProxyType({})) -> None:
    """The random model of a family as converters write it: interleaved heads for Llama, 1 + w norms for Gemma."""
    c = config_of(family)
    arch = {"gemma3_text": "gemma3"}.get(c["model_type"], c["model_type"])
    w = GGUFWriter(path, arch)
    w.add_context_length(c["max_position_embeddings"])
    w.add_embedding_length(c["hidden_size"])
    w.add_block_count(c["num_hidden_layers"])
    w.add_feed_forward_length(c["intermediate_size"])
    w.add_head_count(c["num_attention_heads"])
    w.add_head_count_kv(c["num_key_value_heads"])
    w.add_key_length(c["head_dim"])
    w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    w.add_rope_freq_base(c["rope_theta"])
    w.add_token_list([f"t{i}" for i in range(150)] + [f"[PAD{i}]" for i in range(150, 160)])
    names = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, tensor in random_tensors(c, 0).items():
        stem, _, kind = name.rpartition(".")
        layer = stem.split(".", 3)
        target = f"{top[stem]}.{kind}" if stem in top else f"blk.{layer[2]}.{names[layer[3]]}.{kind}"
        value = tensor.numpy()
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            halves = value.reshape(-1, 2, c["head_dim"] // 2, *value.shape[1:])
            value = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(value.shape)
        w.add_tensor(target, value.astype(types.get(target, value.dtype)))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


@pytest.mark.parametrize("family", ["llama2", "qwen2", "qwen3"])
def test_a_gguf_file_reads_as_the_folder_does(family: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", family)
    folder = row_logits(bring_up(write_folder(tmp_path / "f", family), OPTIONS), TEXT, [0])
    file = bring_up(tmp_path / "m.gguf", OPTIONS)
    assert file.vocabulary.size == 150
    torch.testing.assert_close(row_logits(file, TEXT, [0]), folder, rtol=1e-5, atol=1e-5)


def test_progress_is_told_layer_by_layer(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    bring_up(write_folder(tmp_path, "llama2"), OPTIONS, lambda done, total: told.append((done, total)))
    assert told == [(1, 3), (2, 3), (3, 3)]


# ---- faults


def refused(path: Path, says: str) -> None:
    with pytest.raises(EngineError, match=says):
        bring_up(path, OPTIONS)


def test_faults_of_a_folder_are_named(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "no model at")
    folder = write_folder(tmp_path, "llama3")
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    refused(folder, "model.safetensors is truncated or damaged")
    (folder / "model.safetensors").unlink()
    refused(folder, "no .safetensors files")
    (folder / "tokenizer.json").write_text('{"model": {"vocab":')
    (folder / "model.safetensors").write_bytes(weights)
    refused(folder, "tokenizer.json is truncated")
    (folder / "config.json").unlink()
    refused(folder, "config.json is missing")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "llama3")
    shard(folder)
    (folder / "model-1.safetensors").unlink()
    refused(folder, "model-1.safetensors is missing")


def test_tensors_that_are_missing_or_misshapen_are_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "llama3")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name][:90]}, folder / "model.safetensors")
    refused(folder, r"up_proj.weight' has shape \[90, 64\], the configuration asks for \[96, 64\]")
    save_file({n: t for n, t in tensors.items() if n != name}, folder / "model.safetensors")
    refused(folder, "no tensor 'model.layers.1.mlp.up_proj.weight'")


@pytest.mark.parametrize("share", [0.0, 0.1, 0.6])
def test_a_gguf_file_cut_short_is_said_to_be(share: float, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, "llama2")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    refused(path, r"m\.gguf (cannot be read as a|is not a usable) GGUF file")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(1000))
    refused(path, "does not begin with GGUF")


def test_a_header_that_claims_more_than_there_is_is_not_believed(tmp_path: Path) -> None:
    tensor = struct.pack("<Q", 1) + b"t" + struct.pack("<IQQIQ", 2, 1 << 40, 1 << 40, 0, 0)
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + tensor)
    refused(tmp_path / "m.gguf", "tensor 't' lies beyond its end")


def test_weights_of_a_type_that_is_not_read_are_named_with_the_way_out(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "qwen2", {"blk.1.ffn_up.weight": np.int32})
    refused(tmp_path / "m.gguf", r"blk\.1\.ffn_up\.weight' is I32, which is not read here\. Try --engine llamacpp")


def test_a_gguf_model_of_another_family_is_refused_by_name(tmp_path: Path) -> None:
    w = GGUFWriter(tmp_path / "m.gguf", "mamba")
    w.add_token_list(["a", "b"])
    w.add_tensor("token_embd.weight", np.zeros((2, 32), dtype=np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    refused(tmp_path / "m.gguf", "type 'mamba'")


def test_quantised_pieces_are_dequantised_row_by_row(tmp_path: Path) -> None:
    """A matrix of more rows than are dequantised at a time, in 8 bits."""
    value = np.random.default_rng(0).standard_normal((1100, 64)).astype(np.float32)
    w = GGUFWriter(tmp_path / "m.gguf", "qwen2")
    for add, number in ((w.add_context_length, 64), (w.add_embedding_length, 64), (w.add_block_count, 1)):
        add(number)
    w.add_feed_forward_length(64)
    w.add_head_count(4)
    w.add_layer_norm_rms_eps(1e-6)
    w.add_token_list([f"t{i}" for i in range(1100)])
    q8 = GGMLQuantizationType.Q8_0
    w.add_tensor("token_embd.weight", quantize(value, q8), raw_dtype=q8)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    out = torch.empty(1100, 64)
    open_checkpoint(tmp_path / "m.gguf").read("model.embed_tokens.weight", out)
    assert (out - torch.from_numpy(value)).abs().max() < 0.05


def test_devices_that_are_not_there_are_refused() -> None:
    with pytest.raises(EngineError, match="unknown device 'tpu9'"):
        pick_device("tpu9")
    if not torch.cuda.is_available():
        with pytest.raises(EngineError, match="no CUDA device"):
            pick_device("cuda")


def test_a_cache_too_small_for_a_page_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="too few"):
        bring_up(write_folder(tmp_path, "llama2"), Options(device="cpu", cache_bytes=1000))
