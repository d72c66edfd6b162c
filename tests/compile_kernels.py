"""Compile every Triton kernel for a GPU that need not be there: `python compile_kernels.py CAPABILITY`. Run by test_gpu_check."""

import sys
from typing import Any

import triton
from paceline.kernels import (
    attention_triton,
    candidates_triton,
    choice_triton,
    gate_triton,
    norm_triton,
    product4_triton,
    rotary_triton,
)
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TYPES = {"x": "*bf16", "q": "*bf16", "k": "*bf16", "v": "*bf16", "keys": "*bf16", "values": "*bf16", "out": "*bf16"}
TYPES |= {"delta": "*bf16", "total": "*bf16", "scale": "*bf16", "minimum": "*bf16", "bits": "*u8", "eps": "fp32"}
TYPES |= dict.fromkeys(("part", "lse", "logits", "least", "best", "sound", "best_out", "sound_out", "filters"), "*fp32")
TYPES |= dict.fromkeys(("temperatures", "table", "log_q_out", "chance_out", "weight", "turns"), "*fp32")
TYPES |= dict.fromkeys(("programs", "blocks", "page_table", "extra", "extra_positions", "mask"), "*i32")
TYPES |= dict.fromkeys(("sessions", "positions", "seeds", "roots", "parents", "tokens", "rows_out", "slots"), "*i64")
TYPES |= dict.fromkeys(("count_out", "token_out", "finite_out", "tokens_out"), "*i64") | {"bins_a_nat": "fp32"}

ATTENTION: dict[str, Any] = {"HEADS": 32, "GROUP": 4, "WIDE": 4, "D": 128, "DP": 128, "TILE": 64, "WHOLE": False}
FLOATS = {"scale": "fp32", "positions": "*i32"}
CASES: list[tuple[Any, dict[str, Any], dict[str, str]]] = [
    (attention_triton._attend, {**ATTENTION, "ROWS": 16, "STEP": 16}, FLOATS),
    (attention_triton._attend, {**ATTENTION, "ROWS": 4, "STEP": 1}, FLOATS),  # exact mode
    (attention_triton._attend, {**ATTENTION, "D": 256, "DP": 256, "ROWS": 16, "STEP": 16}, FLOATS),
    (attention_triton._combine, {"D": 128, "DP": 128}, {}),
    (choice_triton._choose, {"FILTERED": True, "PIECE": 16_384, "BLOCK": 1024}, {"token_out": "*i32", "v": "i32"}),
    (choice_triton._choose, {"FILTERED": False, "PIECE": 16_384, "BLOCK": 1024}, {"token_out": "*i32", "v": "i32"}),
    (choice_triton._threshold, {"BLOCK": 8192}, {"v": "i32"}),
    (choice_triton._walk, {"PIECES": 8, "PP": 8, "BLOCK": 64}, {"token": "*i32", "rows": "*i64"}),
    (candidates_triton._candidates, {"F": 5, "FP": 8, "BLOCK": 4096}, {"v": "i32"}),
    (norm_triton._norm, {"D": 4096, "DP": 4096, "ADD": True}, {}),
    (norm_triton._norm, {"D": 128, "DP": 128, "ADD": False}, {}),
    (gate_triton._gate, {"GELU": False, "BLOCK": 1024}, {}),
    (gate_triton._gate, {"GELU": True, "BLOCK": 1024}, {}),
    (rotary_triton._rotate, {"HEADS": 32, "KV_HEADS": 8, "HALF": 64, "HP": 64}, {}),
    (product4_triton._product, {"ROWS": 16, "COLUMNS": 64, "BYTES": 64, "GROUP": 64}, {"k": "i32"}),
    (product4_triton._product, {"ROWS": 64, "COLUMNS": 64, "BYTES": 64, "GROUP": 64}, {"k": "i32"}),
]
SHARED_BYTES = 163 * 1024  # what a block may use on the smaller of the GPUs meant, an A100


def compile_all(capability: int) -> None:
    for kernel, constants, special in CASES:
        names = kernel.arg_names
        types = {n: "constexpr" if n in constants else (special | {}).get(n, TYPES.get(n, "i32")) for n in names}
        source = ASTSource(kernel, types, {(names.index(n),): v for n, v in constants.items()})
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        assert compiled.metadata.shared <= SHARED_BYTES, f"{kernel.fn.__name__} wants {compiled.metadata.shared} bytes"
        print(kernel.fn.__name__, len(compiled.asm["cubin"]))


if __name__ == "__main__":
    compile_all(int(sys.argv[1]))
