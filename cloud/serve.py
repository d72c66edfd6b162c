"""A verifier as a process: engine, scheduler and door put together, until it is told to stop."""

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from paceline.cloud.backup import Ngram, TopUp
from paceline.cloud.connection import House
from paceline.cloud.engine import Engine
from paceline.cloud.grammar import Grammars
from paceline.cloud.keys import Keys
from paceline.cloud.scheduler import Runner, Scheduler
from paceline.cloud.server import start, tls_context
from paceline.cloud.settings import Settings
from paceline.cloud.spans import Spans
from paceline.kernels.heap import keep_small
from paceline.kernels.worker import OneThread
from paceline.protocol.errors import PacelineError
from paceline.protocol.ngrams import Ngrams

log = logging.getLogger(__name__)
__all__ = ["ENGINES", "Settings", "drain", "house_of", "load_backup", "load_engine", "serve"]

ENGINES = ("llamacpp", "torch", "vllm", "toy")
NGRAMS = ("ngram", "both")  # backups that look a table up
CELLS = 4096  # tokens in the cache of a backup's draft, at least


OF_ONE_ENGINE = {
    "device": "torch",
    "exact": "torch",
    "quant": "torch",
    "vllm_args": "vllm",
}  # who honours a setting alone


def check_engine(settings: Settings) -> None:
    """Raises PacelineError for a setting that the engine would ignore."""
    for name in settings.changed(OF_ONE_ENGINE):
        if (engine := OF_ONE_ENGINE[name]) != settings.engine:
            flag = f"--{name.replace('_', '-')}"
            raise PacelineError(
                f"{flag} is for the {engine} engine, this is {settings.engine}: leave it out, or take that one"
            )
    if settings.ngrams is not None and settings.backup not in NGRAMS:
        raise PacelineError(
            f"--ngrams is for --backup ngram or both, this is {settings.backup}: leave it out, or take those"
        )


def load_engine(settings: Settings, model: Path | None) -> Engine:
    """The engine of that name. Raises PacelineError if there is none, it ignores a setting, or the model cannot be loaded."""
    check_engine(settings)
    if settings.engine == "toy":
        from paceline.cloud.engines.toy import ToyEngine

        return ToyEngine(context=settings.context)
    if settings.engine == "llamacpp":
        from paceline.cloud.engines.llamacpp import LlamaEngine

        assert model is not None
        return LlamaEngine(
            model,
            context=settings.context,
            slots=settings.slots,
            threads=settings.threads,
            gpu_layers=settings.gpu_layers,
            keep_order=settings.keep_order,
        )
    if settings.engine == "torch":
        return _torch_engine(settings, model)
    raise PacelineError(f"engine {settings.engine!r} is not known; there are {', '.join(ENGINES)}")


def load_backup(
    settings: Settings,
    engine: Engine,
    draft: Callable[[], Path],
    ngrams: Callable[[str], Ngrams | None] = lambda fingerprint: None,
) -> list[TopUp]:
    """What drafts where an edge's tree holds too little; `draft` is asked for its file only if a model is to.

    `ngrams`: what the target of a vocabulary is known to write, by its fingerprint.

    Raises PacelineError if the draft is for another target.
    """
    found = list[TopUp]()
    if settings.backup in ("draft", "both"):
        try:
            from paceline.cloud.llama_backup import DraftBackup
        except ModuleNotFoundError as e:
            raise PacelineError(f"a backup draft needs {e.name}: pip install 'paceline[cloud-llamacpp]'") from None
        context, layers = max(settings.context, CELLS), settings.gpu_layers
        model = DraftBackup(draft(), engine.vocabulary, context=context, threads=settings.threads, gpu_layers=layers)
        found.append(TopUp(model))
    if settings.backup in NGRAMS:
        if (table := ngrams(engine.vocabulary.fingerprint)) is not None:
            table.check(engine.vocabulary)
        else:
            log.warning(
                "nothing is known of what %s writes, so only what a text repeats is drafted: `paceline draft ngrams` makes"
                " a table for --ngrams",
                engine.name,
            )
        found.append(TopUp(Ngram(table)))
    return found


def _torch_engine(settings: Settings, model: Path | None) -> Engine:
    try:
        import torch
        from paceline.cloud.torch_target import Options, bring_up
    except ModuleNotFoundError as e:
        raise PacelineError(f"the torch engine needs {e.name}: pip install 'paceline[cloud]'") from None
    assert model is not None
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    options = Options(
        device=settings.device,
        exact=settings.exact,
        quant=settings.quant,
        context=settings.context,
        sequences=4 * settings.slots,
    )
    return bring_up(model, options)


def house_of(
    settings: Settings, engine: Engine, vocabulary: Path | None, run: Runner, top_ups: Sequence[TopUp] = ()
) -> House:
    """The verifier's house as the settings want it, in real time. Its scheduler is not stepping yet."""
    house = House(
        Scheduler(engine, run, time.perf_counter, width=settings.width, floor=settings.verify_floor, top_ups=top_ups),
        engine.name,
        engine.vocabulary,
        engine.context,
        session_ttl=settings.session_ttl,
        clock=time.perf_counter,
        bounds=settings.bounds,
    )
    if vocabulary is not None and getattr(engine, "masks", False):
        house.grammars = Grammars.of(vocabulary, engine.vocabulary.size)
    if settings.otel:
        house.spans = Spans.exporting()
    return house


async def serve(
    settings: Settings,
    engine: Engine,
    vocabulary: Path | None,
    ready: Callable[[str], None],
    *,
    watch: Callable[[Callable[[], object]], None] | None = None,
    top_ups: Sequence[TopUp] = (),
) -> None:
    """Serve until SIGINT or SIGTERM. `ready` is told the address; `watch` is given what ends it at once."""
    thread = OneThread("engine")
    house = house_of(settings, engine, vocabulary, thread, top_ups)
    keys = Keys(settings.keys) if settings.keys is not None else None
    tls = None
    if settings.tls_certificate is not None:
        tls = tls_context(settings.tls_certificate, settings.tls_key, settings.tls_clients)
    server = await start(house, settings.host, settings.port, vocabulary, keys=keys, tls=tls)
    stepping = asyncio.create_task(house.scheduler.run())
    tidying = asyncio.create_task(keep_small(let_go=house.forget_old))
    stop = Stop()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        with suppress(NotImplementedError):
            loop.add_signal_handler(name, stop.ask)
    if watch is not None:
        watch(stop.end)
    host, port = server.sockets[0].getsockname()[:2]
    ready(f"{'wss' if tls else 'ws'}://{host}:{port}")
    await asyncio.wait([stepping, asyncio.create_task(stop.asked.wait())], return_when=asyncio.FIRST_COMPLETED)
    await drain(house, stop.now, settings.drain_timeout)
    server.close()
    for task in (stepping, tidying):
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    await server.wait_closed()
    thread.close()
    if house.spans is not None:
        await loop.run_in_executor(None, house.spans.close)


class Stop:
    """A first signal asks for the end, a second one ends at once."""

    def __init__(self) -> None:
        self.asked, self.now = asyncio.Event(), asyncio.Event()

    def ask(self) -> None:
        if self.asked.is_set():
            self.now.set()
        self.asked.set()

    def end(self) -> None:
        self.now.set()
        self.asked.set()


async def drain(house: House, now: asyncio.Event, seconds: float) -> None:
    """Let running sessions end, for at most so many seconds; then they go on elsewhere, from what their edges hold.

    `now` cuts that short.
    """
    if now.is_set() or not len(house.scheduler):
        return
    house.drain(seconds)
    waits = [asyncio.create_task(house.scheduler.idle.wait()), asyncio.create_task(now.wait())]
    await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    house.drain(0.0)
    await asyncio.sleep(0.1)  # for this to reach the edges; those that lose it see the end of the link
