"""Reading an ONNX draft's file before anything is believed of it.

An ONNX file is a protobuf message that may name other files, carry functions and subgraphs, and claim any size. This walks
its bytes (the numbers of the fields are those of onnx.proto) without a protobuf library and lets pass only what a draft is
made of: one graph of known operators, weights inside the file that fill their shapes, a description of its own. Whatever else
is in it is refused by name. Neither onnx nor ONNX Runtime is needed.
"""

import json
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from paceline.protocol.errors import EngineError

LARGEST = (1 << 31) - (1 << 20)  # bytes; protobuf itself ends at 2 GiB
TARGET, TOKEN_MAP, INPUT_MAP = "paceline.target_fingerprint", "paceline.token_map", "paceline.input_map"
LAYOUT = "paceline.layout"

OPERATORS = {
    "": {
        "Add", "Cast", "Gather", "Gelu", "Identity", "MatMul", "Mul", "ReduceSum", "Reshape", "ScatterND",
        "SimplifiedLayerNormalization", "Softmax", "Split", "Squeeze", "Sub", "Transpose", "Unsqueeze",
    },
    "com.microsoft": {"FusedMatMul", "MatMulNBits", "QuickGelu", "RotaryEmbedding", "SkipSimplifiedLayerNormalization"},
}  # fmt: skip
OPSETS = {"": 20, "com.microsoft": 1}
_WIDTHS = {1: 4, 2: 1, 7: 8}  # float32, uint8, int64: bytes of an item
_LIMITS = {
    "layers": 1024, "heads": 4096, "kv_heads": 4096, "head_dim": 4096, "rows": 1 << 22, "context": 1 << 20,
    "window": 1 << 30,
}  # fmt: skip
_MOST_NODES, _MOST_TENSORS, _LONGEST_NAME = 65_536, 65_536, 4096


@dataclass(frozen=True)
class Layout:
    """The numbers a caller needs. rows: of the head; context: positions it can turn by; window: reach of local layers, or 0.

    kv_heads_by_layer: where layers have fewer than `kv_heads`, how many each has; 0 is a layer without attention.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rows: int
    context: int
    window: int
    kv_heads_by_layer: tuple[int, ...] = ()

    @property
    def inputs(self) -> list[str]:
        near = ["near"] if self.window else []
        return ["ids", "positions", "places", "bias", *near, "wanted", *self.caches]

    @property
    def outputs(self) -> list[str]:
        return ["logits", *(f"new_{name}" for name in self.caches)]

    @property
    def caches(self) -> dict[str, int]:
        """Heads of each cache of keys or values, by its name."""
        heads = self.kv_heads_by_layer or (self.kv_heads,) * self.layers
        return {f"{part}.{i}": g for i, g in enumerate(heads) if g for part in ("keys", "values")}


@dataclass(frozen=True)
class OnnxFile:
    """What a file says of itself. Maps as in `token_map`, None where rows are the target's ids."""

    path: Path
    name: str
    layout: Layout
    fingerprint: str
    token_map: list[int] | None
    input_map: list[int] | None


@dataclass
class _Node:
    kind: str = ""
    domain: str = ""
    inputs: list[str] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)  # attributes that are integers


def read_onnx(path: Path) -> OnnxFile:
    """Check the file at `path` whole. Raises EngineError, saying what is wrong with it."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size > LARGEST:
                raise EngineError(f"{path} has {size:,} bytes; a draft in ONNX has at most {LARGEST:,}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Walk(path, data).model()
    except (OSError, ValueError) as e:  # mmap refuses an empty file with a ValueError
        raise EngineError(f"{path} cannot be read as an ONNX draft: {e}") from None


class _Walk:
    """Fields of nested messages as (number, value): an int, or the (begin, end) of bytes."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data = path, data

    def fail(self, what: str) -> EngineError:
        return EngineError(
            f"{self.path} is not a usable ONNX draft: {what}; export it again with `paceline draft export`"
        )

    # ---- bytes

    def fields(self, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """(number, value, begin, end) of each field: a varint's value, or where the bytes of the others lie."""
        at = begin
        while at < end:
            key, at = self.varint(at, end)
            number, wire = key >> 3, key & 7
            if wire == 0:
                value, at = self.varint(at, end)
                yield number, value, at, at
                continue
            if wire == 2:
                length, at = self.varint(at, end)
            elif wire in (1, 5):
                length = 8 if wire == 1 else 4
            else:
                raise self.fail(f"byte {at:,} holds a field of the unknown wire type {wire}")
            if length > end - at:
                raise self.fail(f"it is cut off, or a field at byte {at:,} claims {length:,} bytes")
            yield number, 0, at, at + length
            at += length

    def varint(self, at: int, end: int) -> tuple[int, int]:
        value = 0
        for shift in range(0, 70, 7):
            if at >= end:
                raise self.fail(f"it is cut off at byte {at:,}")
            byte = self.data[at]
            value, at = value | (byte & 127) << shift, at + 1
            if byte < 128:
                return value & (1 << 64) - 1, at
        raise self.fail(f"a number at byte {at:,} does not end")

    def text(self, begin: int, end: int, limit: int = _LONGEST_NAME) -> str:
        if end - begin > limit:
            raise self.fail(f"a name at byte {begin:,} claims {end - begin:,} bytes")
        try:
            return self.data[begin:end].decode()
        except UnicodeDecodeError:
            raise self.fail(f"a name at byte {begin:,} is not UTF-8") from None

    # ---- messages

    def model(self) -> OnnxFile:
        graphs, opsets, metadata = list[tuple[int, int]](), dict[str, int](), dict[str, str]()
        for number, _, begin, end in self.fields(0, len(self.data)):
            if number == 7:
                graphs.append((begin, end))
            elif number == 8:
                domain, version = self.opset(begin, end)
                opsets[domain] = version
            elif number == 14:
                key, value = self.entry(begin, end)
                metadata[key] = value
            elif number not in (1, 2, 3, 4, 5, 6):  # version, producer and remarks
                raise self.fail(f"it has a part of the kind {number}, which no draft has (functions or training)")
        if len(graphs) != 1:
            raise self.fail(f"it holds {len(graphs)} graphs, not one")
        if opsets != OPSETS:
            raise self.fail(f"its operators are of the versions {opsets}; read are {OPSETS}")
        found = self.description(metadata)
        self.graph(*graphs[0], found.layout)
        return found

    def opset(self, begin: int, end: int) -> tuple[str, int]:
        domain, version = "", 0
        for number, value, b, e in self.fields(begin, end):
            if number == 1:
                domain = self.text(b, e)
            elif number == 2:
                version = value
        return domain, version

    def entry(self, begin: int, end: int) -> tuple[str, str]:
        parts = {number: self.text(b, e, 1 << 26) for number, _, b, e in self.fields(begin, end)}
        return parts.get(1, ""), parts.get(2, "")

    def graph(self, begin: int, end: int, layout: Layout) -> None:
        nodes, tensors = list[_Node](), dict[str, tuple[int, ...]]()
        ends: dict[int, list[str]] = {11: [], 12: []}
        for number, _, b, e in self.fields(begin, end):
            if number == 1:
                nodes.append(self.node(b, e))
            elif number == 5:
                name, shape = self.tensor(b, e)
                if name in tensors:
                    raise self.fail(f"the weights {name!r} appear twice")
                tensors[name] = shape
            elif number in ends:
                ends[number].append(next((self.text(x, y) for n, _, x, y in self.fields(b, e) if n == 1), ""))
            elif number not in (2, 10, 13):  # names and remarks
                raise self.fail(f"its graph has a part of the kind {number}, which no draft has (sparse weights)")
            if len(nodes) > _MOST_NODES or len(tensors) > _MOST_TENSORS:
                raise self.fail("its graph has more parts than any draft")
        if sorted(ends[11]) != sorted(layout.inputs) or sorted(ends[12]) != sorted(layout.outputs):
            raise self.fail("its inputs and outputs are not those that its layout states")
        self.check_products(nodes, tensors)
        turns = (layout.context, layout.head_dim // 2)
        for name in ("cos", "sin", *(("local_cos", "local_sin") if layout.window else ())):
            if tensors.get(name) != turns:
                raise self.fail(f"its table {name!r} is {tensors.get(name)}, not {turns}")

    def node(self, begin: int, end: int) -> _Node:
        node = _Node()
        for number, _, b, e in self.fields(begin, end):
            if number == 1:
                node.inputs.append(self.text(b, e))
            elif number == 4:
                node.kind = self.text(b, e)
            elif number == 7:
                node.domain = self.text(b, e)
            elif number == 5:
                self.attribute(node, b, e)
        if node.kind not in OPERATORS.get(node.domain, ()):
            raise self.fail(f"it uses the operator {node.domain or 'ai.onnx'}:{node.kind}, which no draft has")
        return node

    def attribute(self, node: _Node, begin: int, end: int) -> None:
        name = ""
        for number, value, b, e in self.fields(begin, end):
            if number == 1:
                name = self.text(b, e)
            elif number == 3:
                node.numbers[name] = value
            elif number not in (2, 4, 7, 8, 9, 13, 20):  # numbers, text, lists of them, its type
                raise self.fail(f"the attribute {name!r} of {node.kind} holds a graph or weights")

    def tensor(self, begin: int, end: int) -> tuple[str, tuple[int, ...]]:
        """Name and shape; the data must lie here, as it is, and fill the shape."""
        name, kind, shape, held = "", 0, list[int](), -1
        for number, value, b, e in self.fields(begin, end):
            if number == 1:
                shape += [value] if b == e else self.packed(b, e)
            elif number == 2:
                kind = value
            elif number == 8:
                name = self.text(b, e)
            elif number == 9:
                held = e - b
            elif number in (13, 14):
                raise self.fail("its weights are said to lie in another file, which is never read")
            elif number not in (12,):
                raise self.fail(f"the weights {name!r} are not stored as plain bytes")
        if kind not in _WIDTHS or len(shape) > 4 or prod(shape) * _WIDTHS[kind] != held:
            raise self.fail(
                f"the weights {name!r} of type {kind} and shape {tuple(shape)} do not fill their {held:,} bytes"
            )
        return name, tuple(shape)

    def packed(self, at: int, end: int) -> list[int]:
        out = []
        while at < end:
            value, at = self.varint(at, end)
            out.append(value)
        return out

    def check_products(self, nodes: list[_Node], tensors: dict[str, tuple[int, ...]]) -> None:
        """The matrices of `MatMulNBits` are as large as it is told."""
        for node in nodes:
            if node.kind != "MatMulNBits":
                continue
            rows, width, bits, block = (node.numbers.get(key, 0) for key in ("N", "K", "bits", "block_size"))
            if bits not in (4, 8) or block != 32 or width % 32 or not rows or len(node.inputs) != 3:
                raise self.fail(f"a product of {rows} x {width} in {bits} bits and blocks of {block} is not read here")
            count = width // block
            if tensors.get(node.inputs[1]) != (rows, count, 4 * bits) or tensors.get(node.inputs[2]) != (rows * count,):
                raise self.fail(f"the matrix {node.inputs[1]!r} is not {rows} x {width} in {bits} bits")

    # ---- what it says of itself

    def description(self, metadata: Mapping[str, str]) -> OnnxFile:
        try:
            raw = json.loads(metadata[LAYOUT])
            layout = Layout(
                **{key: raw[key] for key in _LIMITS}, kv_heads_by_layer=tuple(raw.get("kv_heads_by_layer", ()))
            )
            maps = [json.loads(metadata[key]) if key in metadata else None for key in (TOKEN_MAP, INPUT_MAP)]
            fingerprint = metadata[TARGET]
        except (KeyError, TypeError, ValueError, RecursionError) as e:
            raise self.fail(f"it does not describe itself ({type(e).__name__}: {e})") from None
        for key, most in _LIMITS.items():
            value = getattr(layout, key)
            if type(value) is not int or not (key != "window") <= value <= most:
                raise self.fail(f"its layout states {key} = {value!r}")
        if by_layer := layout.kv_heads_by_layer:
            sound = all(type(n) is int and 0 <= n <= layout.kv_heads for n in by_layer)
            if len(by_layer) != layout.layers or not sound:
                raise self.fail(f"its layout states {by_layer} heads of keys for {layout.layers} layers")
        for found in maps:
            if found is not None and not (isinstance(found, list) and all(type(n) is int for n in found)):
                raise self.fail("its maps of tokens are not lists of integers")
        return OnnxFile(self.path, metadata.get("name", self.path.stem), layout, fingerprint, *maps)
