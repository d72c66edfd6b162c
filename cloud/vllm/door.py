"""The door in vLLM's API process: its plugin of the group `vllm.endpoint_plugins`.

The websocket at `/`, and the plain paths that a device asks, stand in front of vLLM's own; with a file of keys vLLM's are for
those who have one, too. Settings come from the environment (`PACELINE_CLOUD_...`), as the flags are vLLM's. Frames, limits, keys
and resume are the same code as in front of our own engines.
"""

import asyncio
import os
import signal
import tempfile
import time
from argparse import Namespace
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

from paceline.cloud import asgi
from paceline.cloud.entrance import Entrance
from paceline.cloud.front import Front
from paceline.cloud.house import House
from paceline.cloud.keys import Keys
from paceline.cloud.metrics import VerifierCollector
from paceline.cloud.serve import Stop, drain
from paceline.cloud.settings import READY, Settings, effective
from paceline.cloud.vllm.mailbox import VARIABLE, Mailbox
from paceline.cloud.vllm.params import arguments, demand
from paceline.cloud.vllm.requests import Output, Requests
from paceline.protocol.cloud_session import CloudSession
from paceline.protocol.errors import EngineError
from paceline.protocol.messages import UNSEEDED
from paceline.protocol.vocabulary import Vocabulary

TURN = 0.05  # seconds between two looks whether vLLM's server has begun


class Door:
    """What vLLM loads where `VLLM_PLUGINS` names `paceline`."""

    name = "paceline"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self.verifier: asgi.Verifier | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-")
        self._tasks: list[asyncio.Task[None]] = []

    def attach_router(self, app: Any) -> None:
        app.add_middleware(Entrance, ask=lambda: self.verifier)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        from vllm.v1.metrics.prometheus import get_prometheus_registry

        settings, _ = effective({})
        house = _house(engine_client, settings)
        model = model_folder(str(engine_client.model_config.model))
        vocabulary = await asyncio.to_thread(_vocabulary_file, model, Path(self._folder.name))
        house.vocabulary = await asyncio.to_thread(_vocabulary, model)
        keys = Keys(settings.keys) if settings.keys is not None else None
        self.verifier = asgi.Verifier(Front(house, vocabulary, keys))
        get_prometheus_registry().register(VerifierCollector(house))
        self._tasks.append(asyncio.create_task(_attend(house, state, args, settings.drain_timeout)))


def _house(client: Any, settings: Settings) -> House:
    config = client.vllm_config
    if config.speculative_config is None or config.speculative_config.method != "custom_class":
        raise EngineError("vLLM runs without Paceline's drafter; start it with paceline cloud --engine vllm")
    if config.parallel_config._api_process_count > 1:
        raise EngineError("sessions live in one API process; start vLLM with --api-server-count 1")
    path = Path(os.environ[VARIABLE])
    mailbox = Mailbox(path)
    path.unlink()  # all who read or write it have it open by now
    if mailbox.slots < settings.slots:
        raise EngineError(f"the mailbox has room for {mailbox.slots} sessions, not {settings.slots}; start vLLM anew")
    requests = Requests(
        _generator(client), mailbox, time.perf_counter, int(config.speculative_config.num_speculative_tokens)
    )
    from vllm.platforms import current_platform

    return House(
        requests,
        Path(str(config.model_config.model)).name,
        Vocabulary.of("", ()),
        int(config.model_config.max_model_len),
        session_ttl=settings.session_ttl,
        clock=time.perf_counter,
        bounds=settings.bounds,
        traits=(UNSEEDED,),
        demand=partial(demand, on_cpu=current_platform.is_cpu()),
    )


def _generator(client: Any) -> Any:
    from vllm import SamplingParams, TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    async def generate(session: CloudSession, name: str) -> AsyncGenerator[Output, None]:
        params = SamplingParams(**arguments(session), output_kind=RequestOutputKind.DELTA, skip_clone=True)
        prompt = TokensPrompt(prompt_token_ids=session.sequence)
        async with aclosing(client.generate(prompt, params, name)) as outputs:  # closed at once, which gives it up
            async for output in outputs:
                yield output.outputs[0]

    return generate


def model_folder(name: str) -> Path:
    """Where the files of vLLM's model lie; of one of the hub, those that are there already."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=["*.json", "*.jinja"]))


def _vocabulary(model: Path) -> Vocabulary:
    from paceline.quant.hf_folder import folder_tokens

    return Vocabulary.of(model.name, folder_tokens(model))


def _vocabulary_file(model: Path, folder: Path) -> Path:
    from paceline.quant.vocab_bundle import write_folder_vocabulary

    write_folder_vocabulary(model, folder / "vocabulary")
    return folder / "vocabulary"


async def _attend(house: House, state: Any, args: Namespace, seconds: float) -> None:
    """Say when the server is ready; on a signal let sessions end, then the server."""
    while getattr(state, "server", None) is None or not state.server.started:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(TURN)
    stop, loop = Stop(), asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):  # in place of vLLM's, which end the engine under its sessions
        loop.add_signal_handler(name, stop.ask)
    host, port = state.server.servers[0].sockets[0].getsockname()[:2]
    scheme = "wss" if args.ssl_certfile else "ws"
    os.write(1, f"{READY}{scheme}://{host}:{port}\n".encode())  # not print, which vLLM adorns
    await stop.asked.wait()
    await drain(house, stop.now, seconds)
    state.server.should_exit = True
