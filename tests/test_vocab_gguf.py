"""The vocabulary-only GGUF tokenises as the whole model does."""

import ctypes
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import llama_cpp
import pytest
from paceline.kernels.gguf_file import GgufHeader
from paceline.protocol.errors import EngineError, PacelineError
from paceline.quant.vocab import write_vocabulary

TEXTS = [
    "Hello, world!",
    "  def f(x):\n\treturn x ** 2  # spaces   and tabs\n\n\n",
    "Wörter, 日本語, emoji 🦙🏽 and a zero-width\u200bspace",
    "<|im_start|>user\nWhat is 12345 * 678?<|im_end|>\n<|im_start|>assistant\n",
]


def tokenizer(path: Path) -> Callable[[str], list[int]]:
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    assert model is not None
    vocab = llama_cpp.llama_model_get_vocab(model)

    def tokenise(text: str) -> list[int]:
        data, room = text.encode(), (ctypes.c_int32 * 512)()
        return list(room[: llama_cpp.llama_tokenize(vocab, data, len(data), room, 512, True, True)])

    return tokenise


def test_both_tokenise_alike(smollm2_path: Path, tmp_path: Path) -> None:
    vocabulary = tmp_path / "vocabulary.gguf"
    write_vocabulary(smollm2_path, vocabulary)
    whole, alone = tokenizer(smollm2_path), tokenizer(vocabulary)
    for text in TEXTS:
        assert alone(text) == whole(text)
        assert len(whole(text)) > 3
    assert vocabulary.stat().st_size < smollm2_path.stat().st_size / 50


def test_every_entry_is_copied_and_no_tensor(smollm2_path: Path, tmp_path: Path) -> None:
    write_vocabulary(smollm2_path, tmp_path / "v.gguf")
    whole, alone = GgufHeader(smollm2_path), GgufHeader(tmp_path / "v.gguf")
    assert list(alone.metadata) == list(whole.metadata)
    assert all(alone.entry(key) == whole.entry(key) for key in whole.metadata)
    assert "tokenizer.chat_template" in alone.metadata
    assert whole.tensor_count > 0
    assert alone.tensor_count == 0


def test_the_header_reads_as_the_reference_library_reads_it(smollm2_path: Path, tmp_path: Path) -> None:
    write_vocabulary(smollm2_path, tmp_path / "v.gguf")
    fields = gguf.GGUFReader(tmp_path / "v.gguf").fields
    assert {key for key in fields if not key.startswith("GGUF.")} == set(GgufHeader(smollm2_path).metadata)
    assert fields["tokenizer.ggml.tokens"].contents(2) == "<|im_end|>"


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def test_tokens_that_are_no_text_and_parts_of_a_split(tmp_path: Path) -> None:
    tokens = string(b"tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + string(b"a") + string(b"\xff\xfe")
    split = string(b"split.count") + struct.pack("<IH", 2, 2)
    source = tmp_path / "part.gguf"
    source.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 2) + split + tokens + b"tensors follow")
    write_vocabulary(source, tmp_path / "v.gguf")
    assert (tmp_path / "v.gguf").read_bytes() == b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + tokens


def damaged(header: bytes) -> dict[str, bytes]:
    return {
        "cannot be read": b"",
        "not begin with GGUF": b"hello" * 100,
        "more than the file can hold": header[:5000],
        "version is 1": b"GGUF" + struct.pack("<IQQ", 1, 0, 0),
        "claims": b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60),
        "type 77 is unknown": b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string(b"k") + struct.pack("<I", 77),
        "no vocabulary": b"GGUF" + struct.pack("<IQQ", 3, 0, 0),
    }


@pytest.mark.parametrize("reason", list(damaged(b"")))
def test_damage_is_named_and_leaves_nothing(smollm2_path: Path, tmp_path: Path, reason: str) -> None:
    with smollm2_path.open("rb") as file:
        content = damaged(file.read(10_000))[reason]
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(PacelineError, match=reason):
        write_vocabulary(tmp_path / "bad.gguf", tmp_path / "v.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["bad.gguf"]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="No such file"):
        write_vocabulary(tmp_path / "none.gguf", tmp_path / "v.gguf")
