"""What only a GPU can tell, in under eight minutes: are the kernels right when compiled, and how near the floor is a step.

    scripts/gpu_check [--json FILE]

Without a CUDA device the same code runs on the CPU over tiny shapes, Triton's kernels in its interpreter: a dry run that shows
that nothing but the device is missing; its times mean nothing. A part that fails is reported, and the others still run; the exit
status says whether all passed.
"""

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"

from paceline.cloud.batch import Share, forest, lay_out  # noqa: E402
from paceline.cloud.engine import Work  # noqa: E402
from paceline.cloud.engines.torch import TorchEngine  # noqa: E402
from paceline.cloud.random_checkpoint import LLAMA_8B, RandomCheckpoint  # noqa: E402
from paceline.cloud.torch_target import Options, bring_up_checkpoint  # noqa: E402
from paceline.cloud.witness import row_logits  # noqa: E402
from paceline.kernels.choice import Choices  # noqa: E402
from paceline.kernels.layout import PAGE  # noqa: E402
from paceline.protocol.cloud_session import Plan  # noqa: E402
from paceline.protocol.sampling import Sampling  # noqa: E402

DEVICE = torch.device("cuda" if CUDA else "cpu")
Figures = dict[str, Any]

# Groups of kernel tests that run side by side, as compiling them is what takes the time.
TESTS = (
    ("attention and dtype0", "attention and (dtype1 or dtype2)", "walk or choice or threshold or finite or candidate"),
    ("norm or rotation or gate or four_bits or decoder or exact or bucket or unused",),
)
DRY_TESTS = (("norm or gate",),)
TEST_SECONDS = 200


@dataclass(frozen=True)
class Size:
    """How large the measured things are: the real ones on a GPU, tiny ones in a dry run."""

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    vocabulary: int
    choice_rows: int
    copy_bytes: int


REAL = Size((1, 8, 16, 32, 64, 128), (1024, 8192, 32_768), 131_072, 64, 2**30)
DRY = Size((1, 4), (128,), 512, 4, 2**20)
SIZE = REAL if CUDA else DRY
TINY = replace(
    LLAMA_8B, layers=2, hidden=128, heads=4, kv_heads=2, head_dim=32, ffn=256, rows=512, context=2048, windows=(0, 0)
)
MODEL = LLAMA_8B if CUDA else TINY
SEED = Sampling(seed=1, temperature=0.8)


def seconds(run: Callable[[], object], repeats: int = 20) -> float:
    """Time of `run` on the device: the median of several, by events on CUDA."""
    for _ in range(3 if CUDA else 1):
        run()
    times = []
    for _ in range(repeats if CUDA else 1):
        if CUDA:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
    return float(sorted(times)[len(times) // 2])


def graphed(run: Callable[[], object]) -> Callable[[], object]:
    """`run` as one launch, so that its time is the device's alone."""
    if not CUDA:
        return run
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def environment() -> Figures:
    import triton

    source = torch.empty(SIZE.copy_bytes, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    took = seconds(lambda: target.copy_(source))
    name = torch.cuda.get_device_name() if CUDA else "CPU, dry run"
    bandwidth = 2 * SIZE.copy_bytes / took  # read and written
    return {"device": name, "torch": torch.__version__, "triton": triton.__version__, "bytes_per_second": bandwidth}


def kernel_tests() -> Figures:
    """The tests of the Triton kernels, compiled."""
    tests = Path(__file__).resolve().parent.parent / "tests" / "test_kernels_triton.py"
    outcome: Figures = {}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(tests), "-k"]
    for batch in TESTS if CUDA else DRY_TESTS:
        running = {k: subprocess.Popen([*command, k], stdout=subprocess.PIPE, text=True) for k in batch}
        for chosen, process in running.items():
            out, _ = process.communicate(timeout=TEST_SECONDS)
            outcome[chosen] = out.strip().splitlines()[-1]
            if process.returncode:
                raise AssertionError(f"kernel tests {chosen!r} failed:\n{out[-3000:]}")
    return outcome


def logits_as_on_the_cpu() -> Figures:
    """A small decoder with the same weights here and on the CPU, over prompts and trees, in both modes."""
    texts = [([7 * i % 512 for i in range(n)], Plan((0, 1, 2), (5, 6, 7), (-1, 0, -1))) for n in (3, 100)]
    worst = {}
    for exact in (False, True):
        logits = []
        for device in ("cpu", DEVICE.type):
            checkpoint = RandomCheckpoint("small", TINY, draw_on_device=False)
            options = Options(device=device, dtype="float32", exact=exact, cache_bytes=2**24, free_width=0)
            logits.append(row_logits(bring_up_checkpoint(checkpoint, options), texts, [0, 64]).cpu())
        difference = (logits[0] - logits[1]).abs().max().item()
        worst["exact" if exact else "plain"] = difference
        assert difference < 2e-2, f"logits differ by {difference}"
    return worst


def step_times(quant: str | None) -> Figures:
    """Steps of an 8B-shaped decoder by rows and context, beside the bytes they must read over the bandwidth."""
    options = Options(device=DEVICE.type, quant=quant, cache_bytes=2**33 if CUDA else 2**22, free_width=0)
    options = replace(options, context=max(SIZE.contexts) + 512)
    engine = bring_up_checkpoint(RandomCheckpoint("8B-shaped", MODEL), options)
    engine.cache.keys.normal_()
    engine.cache.values.normal_()
    bandwidth = environment()["bytes_per_second"]
    out: Figures = {}
    for context in SIZE.contexts:
        for rows in SIZE.rows:
            took = _step(engine, context, rows)
            floor = (weight_bytes(quant) + kv_bytes(context + rows)) / bandwidth
            shown = {"forward": took[0], "step": took[1], "floor": floor, "ratio": took[0] / floor}
            out[f"context {context}, rows {rows}"] = shown
    return out


def _step(engine: TorchEngine, context: int, rows: int) -> tuple[float, float]:
    """Seconds of the forward, and of a whole step with choice and walk, after `context` keys that were put there unread."""
    handle = engine.open(())
    held = engine.cache.held(handle)
    assert engine.cache.reserve(handle, context + rows, {handle}), "the cache is too small"
    engine.cache.pages.commit(held, [0] * context)
    assert engine.cache.reserve(handle, context + rows, {handle}), "the cache is too small"
    work = Work(handle, (1,), Plan(tuple(range(rows - 1)), (2,) * (rows - 1), (-1,) * (rows - 1)), SEED)
    batch = lay_out([Share.of(work, held)], engine.decoder.exact)
    with torch.inference_mode():
        forward = seconds(lambda: engine.logits(batch))
        whole = seconds(lambda: engine._walk(batch, engine.logits(batch)))
    engine.cache.forget(handle)
    engine.close(handle)
    return forward, whole


def weight_bytes(quant: str | None) -> float:
    """Bytes of weights that one step reads: every layer's matrices, and the one that gives logits."""
    m, wide = MODEL, 2.0 if CUDA else 4.0
    layer = m.hidden * (sum(m.qkv_sizes) + m.qkv_sizes[0] + 3 * m.ffn)
    return m.layers * layer * (wide if quant is None else 0.5 + 2 * wide / 64) + m.rows * m.hidden * wide


def kv_bytes(context: int) -> float:
    return 2 * MODEL.layers * MODEL.kv_heads * MODEL.head_dim * context * (2 if CUDA else 4)


def attention_times() -> Figures:
    """Our tree attention, for eight sessions with eight rows, beside torch's own over keys that lie in one piece."""
    from paceline.kernels import attention_triton

    sessions, rows, m = (8, 8, MODEL) if CUDA else (2, 2, MODEL)
    dtype = torch.bfloat16 if CUDA else torch.float32
    context = SIZE.contexts[min(1, len(SIZE.contexts) - 1)]
    pages = -(-(context + rows) // PAGE)
    shares = [_share(context, rows, 1 + i * pages, pages) for i in range(sessions)]
    layout = lay_out(shares, False).layout
    q = torch.randn(sessions * rows, m.heads, m.head_dim, device=DEVICE, dtype=dtype)
    keys, values = (
        torch.randn(m.kv_heads, (1 + sessions * pages) * PAGE, m.head_dim, device=DEVICE, dtype=dtype) for _ in "kv"
    )
    plan = attention_triton.upload(layout, frozenset({0}), DEVICE, exact=False, group=m.heads // m.kv_heads)
    ours = seconds(graphed(lambda: attention_triton.attend(q, keys, values, plan, 0, 0.1)))
    k, v = (
        x[:, PAGE:].unflatten(1, (sessions, -1)).transpose(0, 1).contiguous()[:, :, : context + rows]
        for x in (keys, values)
    )
    heads = q.view(sessions, rows, m.heads, m.head_dim).transpose(1, 2).contiguous()
    sdpa = torch.nn.functional.scaled_dot_product_attention
    theirs = seconds(graphed(lambda: sdpa(heads, k, v, scale=0.1, enable_gqa=True)))
    return {"ours": ours, "torch": theirs, "ratio": ours / theirs, "context": context, "rows": sessions * rows}


def _share(context: int, rows: int, first_page: int, pages: int) -> Share:
    plan = Plan(tuple(range(rows - 1)), (0,) * (rows - 1), tuple(range(-1, rows - 2)))
    tables = torch.arange(first_page, first_page + pages).numpy()
    depths = torch.arange(1, rows).numpy()
    return Share(Work(first_page, (0,), plan, SEED), context, tables, depths)


def choice_times() -> Figures:
    """Choice and walk over rows of logits: greedy, sampled, and with every filter on."""
    from paceline.kernels import choice_triton

    sessions, nodes = (8, SIZE.choice_rows // 8 - 1) if CUDA else (2, 1)
    shares = [_share(10, nodes + 1, 1, 1) for _ in range(sessions)]
    trees = forest(lay_out(shares, False), DEVICE)
    logits = torch.randn(len(trees.parents), SIZE.vocabulary, device=DEVICE) * 3
    kinds = {
        "greedy": Sampling(),
        "temperature": SEED,
        "filters": Sampling(seed=1, temperature=0.8, top_k=50, top_p=0.9, min_p=0.01),
    }
    out: Figures = {"rows": len(logits), "vocabulary": SIZE.vocabulary}
    for name, sampling in kinds.items():
        parameters = choice_triton.parameters(Choices((sampling,) * sessions), DEVICE)
        out[name] = seconds(graphed(lambda p=parameters: choice_triton.walk_with(logits, trees, p)))  # type: ignore[misc]
    return out


PARTS: dict[str, Callable[[], Figures]] = {
    "environment": environment,
    "choice and walk": choice_times,
    "attention": attention_times,
    "logits as on the CPU": logits_as_on_the_cpu,
    "steps, 4 bits": lambda: step_times("w4"),
    "steps, 16 bits": lambda: step_times(None),
    "kernel tests": kernel_tests,
}


def check(report: Annotated[Path | None, typer.Option("--json", help="Also write the figures here.")] = None) -> None:
    """Check kernels and speed on this machine's GPU."""
    figures: Figures = {}
    failed = []
    for name, part in PARTS.items():
        began = time.perf_counter()
        try:
            figures[name] = part()
        except Exception:  # whatever it is, the other parts are worth their minutes
            failed.append(name)
            figures[name] = {"failed": traceback.format_exc()}
        typer.echo(f"== {name} ({time.perf_counter() - began:.0f} s)")
        typer.echo(json.dumps(figures[name], indent=1))
        if CUDA:
            torch.cuda.empty_cache()
    if report is not None:
        report.write_text(json.dumps(figures, indent=1))
    typer.echo(f"failed: {', '.join(failed)}" if failed else "all parts passed")
    raise typer.Exit(bool(failed))


if __name__ == "__main__":
    typer.run(check)
