"""A decoder as an ONNX graph whose cache lives outside it. Needs the `onnx` package; knows nothing about files or quantising.

The graph runs S rows that may belong to different sequences and to different branches of a tree. Every row writes its key and
value into a cell of the cache (`ScatterND`; with input and output bound to one buffer, in place) and attends to all T cells
under a bias that says which are its own. So a tree, several generations and text that is read for the first time are one case.

    inputs   ids [1, S]  positions [1, S]  places [G, S, 2] (head, cell)  bias [S * H / G, T]  wanted [W]
             near [S * H / G, T], the bias of layers with a window, where the family has them
             keys.i, values.i [Gi, T, head_dim] for each layer i that has attention
    outputs  logits [W, V]  new_keys.i, new_values.i as the caches

G heads of keys and values serve H of queries; a layer may have fewer, Gi, and as many fewer of queries. Weights are
`com.microsoft` `MatMulNBits` in blocks of 32; that domain is used at version 1, the standard one at opset 20.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from .decoder import Shape
from .nbits import BLOCK, Blocks

OPSET, CONTRIB, IR = 20, 1, 9
MICROSOFT = "com.microsoft"
Extents = list[int | str | None]  # of a value; one that is not known beforehand has a name
INT8_ACTIVATIONS = 4  # `accuracy_level`: the CPU rounds a block's inputs to 8 bits, as llama.cpp does
FLOAT_ACTIVATIONS = 1


class Graph:
    """Nodes and weights as they come; names of values are made here."""

    def __init__(self, shape: Shape, kv_heads: Sequence[int], accuracy: int = INT8_ACTIVATIONS) -> None:
        """kv_heads: of each layer, 0 where it has no attention."""
        self.shape, self.kv_heads, self.accuracy = shape, kv_heads, accuracy
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, onnx.TensorProto] = {}
        self._shared: dict[bytes, str] = {}

    def put(
        self, kind: str, *inputs: str, outputs: int | Sequence[str] = 1, domain: str = "", **attributes: Any
    ) -> str:
        """Add a node; the name of its first output."""
        names = [f"v{len(self.nodes)}.{i}" for i in range(outputs)] if isinstance(outputs, int) else list(outputs)
        self.nodes.append(helper.make_node(kind, list(inputs), names, domain=domain, **attributes))
        return names[0]

    def weight(self, name: str, value: NDArray[np.generic]) -> str:
        if name not in self.weights:
            self.weights[name] = numpy_helper.from_array(np.ascontiguousarray(value), name)
        return name

    def constant(self, *values: int) -> str:
        """A vector of integers, such as a shape."""
        return self.weight("c" + "_".join(map(str, values)).replace("-", "m"), np.array(values, np.int64))

    # ---- parts of a decoder

    def linear(self, x: str, name: str, w: Blocks, bias: NDArray[np.float32] | None = None) -> str:
        """x [..., C] times the matrix w [R, C]."""
        rows, count = w.scales.shape
        packed = self.weight(f"{name}.codes", w.packed)
        scales = self.weight(f"{name}.scales", w.scales.reshape(-1))
        out = self.put(
            "MatMulNBits", x, packed, scales, domain=MICROSOFT,
            K=count * BLOCK, N=rows, bits=w.bits, block_size=BLOCK, accuracy_level=self.accuracy,
        )  # fmt: skip
        if w.offsets is not None:
            sums = self.put(
                "ReduceSum", self.put("Reshape", x, self.constant(0, 0, count, BLOCK)), self.constant(3), keepdims=0
            )
            out = self.put("Add", out, self.put("MatMul", sums, self.weight(f"{name}.offsets", w.offsets.T)))
        return out if bias is None else self.put("Add", out, self.weight(f"{name}.bias", bias))

    def embedded(self, ids: str, name: str, table: Blocks) -> str:
        """ids [1, S] as rows of the table [V, D], which may be the head's matrix too: [1, S, D]."""
        table = table.widened()
        codes = self.put("Gather", self.weight(f"{name}.codes", table.packed), ids)  # [1, S, D / 32, 32]
        centred = self.put(
            "Sub", self.put("Cast", codes, to=TensorProto.FLOAT), self.weight("middle", np.array([128], np.float32))
        )
        # The head keeps its scales in one row, so they are taken by number: row * blocks + block.
        blocks = table.scales.shape[1]
        first = self.put("Mul", self.put("Unsqueeze", ids, self.constant(2)), self.constant(blocks))
        each = self.put("Add", first, self.weight("blocks", np.arange(blocks)))
        scales = self.put("Gather", self.weight(f"{name}.scales", table.scales.reshape(-1)), each)
        x = self.put("Mul", centred, self.put("Unsqueeze", scales, self.constant(3)))
        if table.offsets is not None:
            low = self.put("Gather", self.weight(f"{name}.rows_offsets", table.offsets), ids)
            x = self.put("Add", x, self.put("Unsqueeze", low, self.constant(3)))
        x = self.put("Reshape", x, self.constant(0, 0, self.shape.width))
        scale = self.shape.embedding_scale
        return x if scale == 1.0 else self.put("Mul", x, self.weight("embedding_scale", np.array([scale], np.float32)))

    def norm(self, x: str, name: str, weight: NDArray[np.float32]) -> str:
        """Root-mean-square norm over the last axis."""
        at = self.weight(name, weight)
        return self.put("SimplifiedLayerNormalization", x, at, axis=-1, epsilon=self.shape.eps, stash_type=1)

    def add_norm(self, x: str, branch: str, name: str, weight: NDArray[np.float32]) -> tuple[str, str]:
        """x + branch, normed; and the sum itself."""
        at = len(self.nodes)
        outputs = [f"v{at}.0", "", "", f"v{at}.3"]
        inputs = (x, branch, self.weight(name, weight))
        self.put("SkipSimplifiedLayerNormalization", *inputs, outputs=outputs, domain=MICROSOFT, epsilon=self.shape.eps)
        return outputs[0], outputs[3]

    def rotate(self, x: str, heads: int, local: bool) -> str:
        """x [1, S, heads * head_dim] turned by the positions."""
        tables = ("local_cos", "local_sin") if local else ("cos", "sin")
        return self.put(
            "RotaryEmbedding", x, "positions", *tables, domain=MICROSOFT,
            interleaved=int(self.shape.interleaved), num_heads=heads,
        )  # fmt: skip

    def split(self, x: str, *sizes: int) -> list[str]:
        names = [f"v{len(self.nodes)}.{i}" for i in range(len(sizes))]
        self.put("Split", x, self.constant(*sizes), outputs=names, axis=-1)
        return names

    def by_group(self, x: str, i: int, each: int) -> str:
        """[1, S, heads * head_dim] as [G, S * each, head_dim], where `each` heads of x belong to one of layer i's G."""
        g, d = self.kv_heads[i], self.shape.head_dim
        x = self.put("Transpose", self.put("Reshape", x, self.constant(-1, g, each * d)), perm=[1, 0, 2])
        return x if each == 1 else self.put("Reshape", x, self.constant(g, -1, d))

    def places(self, i: int) -> str:
        """Where layer i's heads write: [G, S, 2]."""
        g = self.kv_heads[i]
        return "places" if g == self.shape.kv_heads else self.put("Gather", "places", self.constant(*range(g)), axis=0)

    def cached(self, new: str, cache: str, i: int) -> str:
        """The cache of layer i with the rows' own keys or values [1, S, G * head_dim] in their cells."""
        return self.put(
            "ScatterND", f"{cache}.{i}", self.places(i), self.by_group(new, i, 1), outputs=[f"new_{cache}.{i}"]
        )

    def attend(self, i: int, q: str, k: str, v: str) -> str:
        """Queries, keys, values [1, S, heads * head_dim] to the mix [1, S, H * head_dim]."""
        s, g, local = self.shape, self.kv_heads[i], self.shape.local(i)
        each = s.heads // s.kv_heads
        scores = self.put(
            "FusedMatMul", self.by_group(q, i, each), self.cached(k, "keys", i), domain=MICROSOFT,
            transB=1, alpha=s.head_dim**-0.5,
        )  # fmt: skip
        shares = self.put("Softmax", self.put("Add", scores, "near" if local else "bias"), axis=-1)
        mixed = self.put("MatMul", shares, self.cached(v, "values", i))
        if each > 1:
            mixed = self.put("Reshape", mixed, self.constant(g, -1, each * s.head_dim))
        return self.put(
            "Reshape", self.put("Transpose", mixed, perm=[1, 0, 2]), self.constant(1, -1, g * each * s.head_dim)
        )

    def gated(self, gate: str, up: str) -> str:
        if self.shape.gelu:
            return self.put("Mul", self.put("Gelu", gate, approximate="tanh"), up)
        return self.put("Mul", self.put("QuickGelu", gate, domain=MICROSOFT, alpha=1.0), up)

    def rotations(self, length: int) -> None:
        """The tables of cosines and sines, [length, head_dim / 2] each."""
        s = self.shape
        for prefix, base in (("", s.rope_base), *((("local_", s.local_rope_base),) if s.window else ())):
            half = np.arange(0, s.head_dim, 2) / s.head_dim
            angles = np.arange(length)[:, None] * base ** -half[None]
            self.weight(f"{prefix}cos", np.cos(angles).astype(np.float32))
            self.weight(f"{prefix}sin", np.sin(angles).astype(np.float32))

    def model(self, rows: int, metadata: Mapping[str, str]) -> onnx.ModelProto:
        """The finished model; rows: of the head."""
        s, rep = self.shape, self.shape.heads // self.shape.kv_heads
        f, n = TensorProto.FLOAT, TensorProto.INT64
        caches: dict[str, Extents] = {
            f"{part}.{i}": [g, "T", s.head_dim] for i, g in enumerate(self.kv_heads) if g for part in ("keys", "values")
        }
        mask = f"{rep}S" if rep > 1 else "S"
        given: list[tuple[str, int, Extents]] = [
            ("ids", n, [1, "S"]),
            ("positions", n, [1, "S"]),
            ("places", n, [s.kv_heads, "S", 2]),
            ("bias", f, [mask, "T"]),
        ]
        given += [("near", f, [mask, "T"])] if s.window else []
        given += [("wanted", n, ["W"]), *((name, f, extents) for name, extents in caches.items())]
        made: list[tuple[str, int, Extents]] = [
            ("logits", f, ["W", rows]),
            *((f"new_{name}", f, extents) for name, extents in caches.items()),
        ]
        graph = helper.make_graph(
            self.nodes,
            "draft",
            [helper.make_tensor_value_info(*value) for value in given],
            [helper.make_tensor_value_info(*value) for value in made],
            list(self.weights.values()),
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, CONTRIB)]
        model = helper.make_model(graph, producer_name="paceline", opset_imports=opsets, ir_version=IR)
        helper.set_model_props(model, dict(metadata))
        return model
