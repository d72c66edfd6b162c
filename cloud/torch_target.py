"""Bringing a torch target up: from a path and a user's wishes to an engine that is measured and, in exact mode, checked."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from paceline.cloud.architecture import Config
from paceline.cloud.checkpoint import Checkpoint, dtype_of, open_checkpoint
from paceline.cloud.engines.torch import Decoder, TorchEngine
from paceline.cloud.kv import Cache, Space, page_bytes
from paceline.cloud.loader import MakeProduct, Progress, Target, dense, load
from paceline.cloud.witness import demand_exactness, free_width, measure_step_cost
from paceline.kernels.layout import PAGE
from paceline.kernels.suite import pick
from paceline.protocol.errors import EngineError
from paceline.protocol.vocabulary import Vocabulary

DEFAULT_CONTEXT = 8192  # where the model allows more and nobody asked for it
CPU_CACHE_BYTES = 2 * 2**30
CUDA_SHARE = 0.85  # of the memory that is free once the weights are in


@dataclass(frozen=True)
class Options:
    """What a user may ask of the torch engine. `cache_bytes` is the hard limit of the KV cache."""

    device: str = "auto"
    dtype: str = "auto"
    exact: bool = False
    quant: str | None = None  # nf4, int8 or w4
    context: int | None = None
    cache_bytes: int | None = None
    sequences: int = 256
    free_width: int | None = None  # None: measured
    graphs: bool = True  # on CUDA


def bring_up(path: Path, options: Options, progress: Progress = lambda done, total: None) -> TorchEngine:
    """The engine for the model at `path`. Raises EngineError with what to do about it."""
    return bring_up_checkpoint(open_checkpoint(path), options, progress)


def bring_up_checkpoint(
    checkpoint: Checkpoint, options: Options, progress: Progress = lambda done, total: None
) -> TorchEngine:
    """As `bring_up`, from a checkpoint that is open already."""
    device = pick_device(options.device)
    context = min(options.context or DEFAULT_CONTEXT, checkpoint.config.context)
    decoder = _decoder(checkpoint, options, device, context, progress)
    cache = Cache(
        checkpoint.config, _space(options, checkpoint.config, context, decoder), _dtype(options, device), device
    )
    engine = TorchEngine(decoder, cache, min(context, (cache.pages.count - 1) * PAGE))
    if decoder.suite.name == "triton" and options.quant in (None, "w4") and options.graphs:
        from paceline.cloud.graphs import Graphs

        engine.run = Graphs(decoder, cache, engine.eager)
    if options.exact:
        demand_exactness(engine)
    if options.free_width is None:
        engine.step_cost = measure_step_cost(engine)
        engine.free_width = free_width(engine.step_cost)
    else:
        engine.free_width = options.free_width
    return engine


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as e:
        raise EngineError(f"unknown device {name!r}; give auto, cpu, cuda or cuda:N") from e
    if device.type == "cuda" and not torch.cuda.is_available():
        raise EngineError("there is no CUDA device here; give --device cpu")
    return device


def _dtype(options: Options, device: torch.device) -> torch.dtype:
    return dtype_of(options.dtype, device)


def _decoder(
    checkpoint: Checkpoint, options: Options, device: torch.device, context: int, progress: Callable[[int, int], None]
) -> Decoder:
    make_head = dense(options.exact)
    target = Target(device, _dtype(options, device), _make(options, device), make_head)
    return Decoder(
        config=checkpoint.config,
        weights=load(checkpoint, target, context, progress),
        vocabulary=Vocabulary.of(checkpoint.name, checkpoint.spellings),
        device=device,
        suite=pick(device, options.exact, checkpoint.config.heads // checkpoint.config.kv_heads),
        exact=options.exact,
    )


def _make(options: Options, device: torch.device) -> MakeProduct:
    if options.quant is None:
        return dense(options.exact)
    from paceline.cloud.quantised import quantiser

    return quantiser(options.quant, device, options.exact)


def _space(options: Options, config: Config, context: int, decoder: Decoder) -> Space:
    """The cache's budget: as asked; else a share of a GPU's free memory, or a fixed sum that a host can spare."""
    if options.cache_bytes is not None:
        return Space(options.cache_bytes, options.sequences)
    if decoder.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(decoder.device)
        return Space(int(free * CUDA_SHARE), options.sequences)
    whole = (options.sequences * -(-context // PAGE) + 1) * page_bytes(config, _dtype(options, decoder.device))
    return Space(min(CPU_CACHE_BYTES, whole), options.sequences)
