"""The compute layer: Triton kernels beside their torch references, and the thin binding to llama.cpp."""
