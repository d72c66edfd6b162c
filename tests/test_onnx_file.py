"""An ONNX file is believed only where it is what a draft is made of; anything else is refused by name, and nothing crashes."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from paceline.kernels.onnx_file import LARGEST, read_onnx
from paceline.protocol.errors import EngineError, PacelineError

pytest.importorskip("onnx")
import onnx
from onnx import helper, numpy_helper
from small_models import write_folder


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    from paceline.quant import factory
    from paceline.quant.onnx_export import Rounding, model_bytes, open_source

    at = tmp_path_factory.mktemp("onnx")
    write_folder(at / "target", "llama2", num_hidden_layers=1)
    factory.build(at / "target", at / "d", factory.Options(quant="q4_0", rounding="plain"))
    return model_bytes(open_source(at / "d", None), Rounding())


def read(data: bytes, tmp_path: Path) -> object:
    path = tmp_path / "draft.onnx"
    path.write_bytes(data)
    return read_onnx(path)


def changed(sound: bytes, change: Callable[..., object]) -> bytes:
    model = onnx.ModelProto.FromString(sound)
    change(model)
    return bytes(model.SerializeToString())


def weights(model: onnx.ModelProto, end: str) -> onnx.TensorProto:
    return next(t for t in model.graph.initializer if t.name.endswith(end))


def product(model: onnx.ModelProto) -> onnx.NodeProto:
    return next(n for n in model.graph.node if n.op_type == "MatMulNBits")


def outside(model: onnx.ModelProto) -> None:
    tensor = weights(model, "attn_norm")
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../../../../etc/passwd")


def outside_in_an_attribute(model: onnx.ModelProto) -> None:
    tensor = numpy_helper.from_array(numpy_helper.to_array(weights(model, "attn_norm")), "x")
    tensor.external_data.add(key="location", value="/etc/passwd")
    model.graph.node[0].attribute.append(helper.make_attribute("value", tensor))


def branch(model: onnx.ModelProto) -> None:
    graph = helper.make_graph([], "inner", [], [])
    model.graph.node.append(helper.make_node("Add", ["ids", "ids"], ["x"]))
    model.graph.node[-1].attribute.append(helper.make_attribute("then_branch", graph))


def foreign(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Run", ["ids"], ["x"], domain="ai.example"))


def loop(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Loop", ["ids"], ["x"]))


def function(model: onnx.ModelProto) -> None:
    model.functions.append(helper.make_function("d", "f", ["a"], ["b"], [], [helper.make_opsetid("", 20)]))


def sparse(model: onnx.ModelProto) -> None:
    model.graph.sparse_initializer.add()


def larger(model: onnx.ModelProto) -> None:
    weights(model, "attn_norm").dims[0] = 1 << 40


def negative(model: onnx.ModelProto) -> None:
    weights(model, "attn_norm").dims[0] = -64


def twice(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(weights(model, "attn_norm"))


def strings(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(helper.make_tensor("s", onnx.TensorProto.STRING, [1], [b"x"]))


def wider(model: onnx.ModelProto) -> None:
    next(a for a in product(model).attribute if a.name == "K").i = 1 << 20


def taller(model: onnx.ModelProto) -> None:
    next(a for a in product(model).attribute if a.name == "N").i += 1


def more_bits(model: onnx.ModelProto) -> None:
    next(a for a in product(model).attribute if a.name == "bits").i = 2


def fewer_scales(model: onnx.ModelProto) -> None:
    tensor = weights(model, "ffn_down.scales")
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor)[:-1], tensor.name))


def shorter_table(model: onnx.ModelProto) -> None:
    tensor = weights(model, "cos")
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor)[:10], tensor.name))


def another_version(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 99


def another_input(model: onnx.ModelProto) -> None:
    model.graph.input.add().name = "more"


def says(key: str, value: str | None) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        kept = {p.key: p.value for p in model.metadata_props if p.key != key}
        helper.set_model_props(model, kept if value is None else kept | {key: value})

    return change


HEADS = (
    '{"layers": 1, "heads": 4, "kv_heads": 4, "head_dim": 16, "rows": 64, "context": 1024, "window": 0,'
    ' "kv_heads_by_layer": [5]}'
)
HUGE = '{"layers": 1, "heads": 4, "kv_heads": 4, "head_dim": 16, "rows": 99999999999, "context": 1024, "window": 0}'


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (outside, "another file, which is never read"),
        (outside_in_an_attribute, "'value' of Gather holds a graph or weights|'value' of .* holds"),
        (branch, "'then_branch' of Add holds a graph"),
        (foreign, "operator ai.example:Run"),
        (loop, "operator ai.onnx:Loop"),
        (function, "functions or training"),
        (sparse, "sparse weights"),
        (larger, "do not fill their 256 bytes"),
        (negative, "do not fill their 256 bytes"),
        (twice, "appear twice"),
        (strings, "not stored as plain bytes"),
        (wider, "is not .* x 1048576 in"),
        (taller, "the matrix .* is not"),
        (more_bits, "in 2 bits"),
        (fewer_scales, "the matrix .* is not"),
        (shorter_table, "its table 'cos'"),
        (another_version, "versions"),
        (another_input, "inputs and outputs"),
        (says("paceline.layout", None), "does not describe itself"),
        (says("paceline.layout", "[" * 100_000), "does not describe itself"),
        (says("paceline.layout", HUGE), "states rows = 99999999999"),
        (says("paceline.layout", HEADS), r"states \(5,\) heads of keys for 1 layers"),
        (says("paceline.target_fingerprint", None), "does not describe itself"),
        (says("paceline.token_map", '[1, "x"]'), "not lists of integers"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_no_draft_has_is_refused(change: Callable[..., object], why: str, sound: bytes, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=why) as caught:
        read(changed(sound, change), tmp_path)
    assert "export it again" in str(caught.value)


def test_two_graphs_that_a_parser_would_merge_are_refused(sound: bytes, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="2 graphs"):
        read(sound + sound, tmp_path)


def test_a_file_cut_anywhere_is_refused(sound: bytes, tmp_path: Path) -> None:
    for end in [0, 1, 2, *random.Random(0).sample(range(3, len(sound)), 60), len(sound) - 1]:
        with pytest.raises(EngineError):
            read(sound[:end], tmp_path)


def test_damaged_bytes_are_refused_or_harmless(sound: bytes, tmp_path: Path) -> None:
    """A flipped bit of a weight is not seen here (the card's digest sees it); nothing else than our error may come."""
    rng, refused = random.Random(1), 0
    for _ in range(300):
        data = bytearray(sound)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(min(len(data), 4000)) if rng.random() < 0.7 else rng.randrange(len(data))] ^= (
                1 << rng.randrange(8)
            )
        try:
            read(bytes(data), tmp_path)
        except PacelineError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize(
    "data", [b"GGUF" * 100, b"\xff" * 64, b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\x0b" * 9]
)
def test_what_is_no_onnx_at_all_is_refused(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="not a usable ONNX draft"):
        read(data, tmp_path)


def test_a_file_larger_than_the_format_allows_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "draft.onnx"
    with path.open("wb") as file:
        file.truncate(LARGEST + 1)  # takes no room on the disk
    with pytest.raises(EngineError, match="has at most"):
        read_onnx(path)


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="cannot be read"):
        read_onnx(tmp_path / "none.onnx")
