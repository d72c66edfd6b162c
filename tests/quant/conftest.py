"""A target small enough to train in seconds: real in every part (GGUF, byte-level BPE, chat template), random in its weights."""

from pathlib import Path

import gguf
import numpy as np
import pytest

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokens() -> list[str]:
    """The 256 byte-level characters of GPT-2's alphabet, in byte order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(spare)) for b in range(256)]


def write_target(
    path: Path, layers: int = 3, width: int = 64, hidden: int = 128, seed: int = 0, base: str = "tiny"
) -> Path:
    rng = np.random.default_rng(seed)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_tokens(), "th", "he", "in", "er"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(base)
    writer.add_block_count(layers)
    writer.add_context_length(512)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(width // 4)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["t h", "h e", "i n", "e r"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)

    def put(name: str, *shape: int, scale: float = 1.0) -> None:
        writer.add_tensor(name, (rng.standard_normal(shape) * scale / np.sqrt(shape[-1])).astype(np.float32))

    put("token_embd.weight", len(tokens), width, scale=8.0)
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    for i in range(layers):
        for name, rows, columns in (
            ("attn_q", width, width),
            ("attn_k", width // 2, width),
            ("attn_v", width // 2, width),
            ("attn_output", width, width),
            ("ffn_gate", hidden, width),
            ("ffn_up", hidden, width),
            ("ffn_down", width, hidden),
        ):
            put(f"blk.{i}.{name}.weight", rows, columns, scale=1.5)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{name}.weight", np.ones(width, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another target with another vocabulary."""
    folder = tmp_path_factory.mktemp("other")
    path = write_target(folder / "other.gguf", seed=1, base="other")
    data = path.read_bytes()
    assert data.count(b"<|im_end|>") >= 1
    changed = data.replace(b"<|im_end|>", b"<|i__end|>", 1)  # the token list comes before the template
    path.write_bytes(changed)
    return path
