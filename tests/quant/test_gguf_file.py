"""Reading GGUF files: equal to the reference reader on good ones, a clear error on every broken one."""

import random
import resource
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from paceline.kernels.gguf_file import GgufFile, GgufHeader
from paceline.protocol.errors import EngineError


def test_reads_what_the_reference_reader_reads(tiny: Path) -> None:
    own, reference = GgufFile(tiny), gguf.GGUFReader(tiny)
    assert set(own.tensors) == {t.name for t in reference.tensors}
    for t in reference.tensors:
        assert own.info(t.name).shape == tuple(int(n) for n in t.shape[::-1])
        assert np.array_equal(own.array(t.name).ravel(), np.asarray(t.data).ravel())
    assert own.metadata["tokenizer.ggml.tokens"][1] == "<|im_start|>"
    assert own.metadata["llama.attention.head_count"] == 4


def test_dequantises_as_the_reference_does(smollm2_path: Path) -> None:
    own, reference = GgufFile(smollm2_path), gguf.GGUFReader(smollm2_path)
    for t in reference.tensors[:4]:
        expected = gguf.quants.dequantize(t.data, t.tensor_type)
        assert np.array_equal(own.array(t.name).ravel(), np.asarray(expected, np.float32).ravel())


def test_every_cut_is_refused_with_the_file_named(tiny: Path, tmp_path: Path) -> None:
    data = tiny.read_bytes()
    for size in [0, 3, 4, 7, 12, 23, 24, 100, 1_000, 5_000, len(data) // 2, len(data) - 40]:
        cut = tmp_path / f"cut{size}.gguf"
        cut.write_bytes(data[:size])
        with pytest.raises(EngineError, match=f"cut{size}"):
            GgufFile(cut)


def header(*parts: bytes, tensors: int = 0, entries: int = 1) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, entries) + b"".join(parts)


def entry(name: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


HOSTILE = {
    "tensor count": header(tensors=1 << 60, entries=0),
    "entry count": header(entries=1 << 60),
    "key length": header(struct.pack("<Q", 1 << 62)),
    "string length": header(entry(b"a", 8, struct.pack("<Q", 1 << 62))),
    "array length": header(entry(b"a", 9, struct.pack("<IQ", 4, 1 << 61))),
    "strings in array": header(entry(b"a", 9, struct.pack("<IQ", 8, 1 << 59))),
    "nested array": header(entry(b"a", 9, struct.pack("<IQ", 9, 3) + bytes(64))),
    "unknown type": header(entry(b"a", 77, bytes(16))),
    "same key twice": header(entry(b"a", 4, bytes(4)), entry(b"a", 4, bytes(4)), entries=2),
    "not utf-8": header(entry(b"\xff\xfe", 4, bytes(4))),
    "alignment": header(entry(b"general.alignment", 4, struct.pack("<I", 3))),
    "huge tensor": header(
        struct.pack("<Q", 1) + b"t" + struct.pack("<IQQIQ", 2, 1 << 40, 1 << 40, 0, 0), tensors=1, entries=0
    ),
    "dimensions": header(struct.pack("<Q", 1) + b"t" + struct.pack("<I", 1 << 30) + bytes(64), tensors=1, entries=0),
    "tensor type": header(
        struct.pack("<Q", 1) + b"t" + struct.pack("<IQIQ", 1, 32, 999, 0) + bytes(200), tensors=1, entries=0
    ),
    "ragged blocks": header(
        struct.pack("<Q", 1) + b"t" + struct.pack("<IQIQ", 1, 33, 2, 0) + bytes(200), tensors=1, entries=0
    ),
    "tensor outside": header(
        struct.pack("<Q", 1) + b"t" + struct.pack("<IQIQ", 1, 32, 0, 1 << 50), tensors=1, entries=0
    ),
    "other magic": b"GGML" + bytes(100),
    "other version": b"GGUF" + struct.pack("<IQQ", 9, 0, 0),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_headers_are_refused_without_a_large_allocation(what: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(HOSTILE[what])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(EngineError, match=r"hostile\.gguf"):
        GgufFile(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kilobytes


def test_random_damage_never_escapes_as_another_error(tiny: Path, tmp_path: Path) -> None:
    data, rng = tiny.read_bytes(), random.Random(0)
    path = tmp_path / "damaged.gguf"
    for _ in range(150):
        broken = bytearray(data)
        for _ in range(rng.randint(1, 8)):
            broken[rng.randrange(6_000)] = rng.randrange(256)
        path.write_bytes(broken)
        try:
            file = GgufFile(path)
            for name in file.tensors:
                file.raw(name)
        except EngineError:
            pass


def test_tokens_that_are_no_text_are_spelt_as_llama_spells_them(tmp_path: Path) -> None:
    text = struct.pack("<IQ", 8, 2) + struct.pack("<Q", 1) + b"a" + struct.pack("<Q", 3) + b"\xff\xfeb"
    (tmp_path / "m.gguf").write_bytes(header(entry(b"tokens", 9, text)))
    found = GgufHeader(tmp_path / "m.gguf")
    assert found.metadata["tokens"] == ["a", b"\xff\xfeb".decode("utf-8", "replace")]
    assert found.entry("tokens") == entry(b"tokens", 9, text)


def test_metadata_is_read_whatever_the_tensors_are(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(
        header(entry(b"a", 4, struct.pack("<I", 7)), tensors=1) + b"of a type yet to come"
    )
    assert GgufHeader(tmp_path / "m.gguf").metadata == {"a": 7}
    with pytest.raises(EngineError, match=r"m\.gguf"):
        GgufFile(tmp_path / "m.gguf")


@pytest.mark.parametrize("kind", [4, 5, 10, 11])
def test_arrays_of_integers_are_told_from_others(tmp_path: Path, kind: int) -> None:
    form = {4: "<3I", 5: "<3i", 10: "<3Q", 11: "<3q"}[kind]
    path, whole = tmp_path / "m.gguf", struct.pack("<IQ", kind, 3) + struct.pack(form, 1, 2, 3)
    path.write_bytes(header(entry(b"map", 9, whole), entry(b"half", 9, struct.pack("<IQf", 6, 1, 0.5)), entries=2))
    found = GgufHeader(path)
    read = found.integers("map")
    assert read is not None
    assert (read == [1, 2, 3]).all()
    assert found.integers("none") is None
    with pytest.raises(EngineError, match="half is not an array of integers"):
        found.integers("half")


def test_a_missing_tensor_is_named(tiny: Path) -> None:
    with pytest.raises(EngineError, match=r"tiny\.gguf has no tensor 'blk\.9\.ffn_up\.weight'"):
        GgufFile(tiny).array("blk.9.ffn_up.weight")


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system does not say what a mapping holds")
def test_a_tensor_that_was_read_leaves_its_pages(tmp_path: Path) -> None:
    path, table = tmp_path / "wide.gguf", np.arange(8_000_000, dtype=np.float32).reshape(-1, 500)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("table", table)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(path)
    assert file.raw("table").sum() > 0  # every page was touched
    before = mapped(path)
    assert np.array_equal(file.array("table"), table)
    assert mapped(path) < 0.1 * before
    assert np.array_equal(file.array("table", 7_000, 7_010), table[7_000:7_010])


def mapped(path: Path) -> int:
    """Kilobytes of a file's mapping that are in this process's memory."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.endswith(str(path)))
    return int(next(line for line in lines[at:] if line.startswith("Rss:")).split()[1])
