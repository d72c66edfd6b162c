"""Verifiers as a Ray Serve deployment: every replica is one verifier behind Ray's own proxy.

    application = verifiers(settings, load, Scale(min_replicas=2))

Ray routes a websocket to a replica that has room (`max_ongoing_requests` is the number of sessions a replica runs), and, where
this Ray has a consistent-hash router, an edge that comes back with the same `x-session-id` to the same one. Ray tells a replica
nothing when it takes it out of service; it only asks it for its health no more. So a replica that is no longer asked, while the
controller says that one is stopping, tells its edges to go on elsewhere. Knows nothing about models: `load` brings them.
"""

import asyncio
import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.cloud.asgi import Verifier
from paceline.cloud.backup import TopUp
from paceline.cloud.engine import Engine
from paceline.cloud.front import Front
from paceline.cloud.keys import Keys
from paceline.cloud.serve import drain, house_of
from paceline.cloud.settings import Settings
from paceline.kernels.worker import OneThread
from paceline.protocol.errors import PacelineError

NAME = "Verifier"
CHECK_SECONDS = 1.0  # between two questions of the controller
UNASKED = 4  # checks that must have been left out before the controller is asked
MARGIN = 10.0  # seconds beyond the drain, to notice that it begins and to end
ROUTER = "ray.serve.experimental.consistent_hash_router"


@dataclass(frozen=True)
class Loaded:
    """A target with the file that GET /v1/vocabulary gives out, and what drafts beside it."""

    engine: Engine
    vocabulary: Path | None = None
    top_ups: Sequence[TopUp] = ()


Load = Callable[[Settings], Loaded]


@dataclass(frozen=True)
class Scale:
    """How many replicas, what each one takes, and how soon there are more. Seconds."""

    min_replicas: int = 1
    max_replicas: int = 8
    cpus: float = 1.0
    gpus: float = 0.0
    upscale_delay: float = 10.0
    downscale_delay: float = 300.0
    affinity: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise PacelineError(
                f"{self.min_replicas} to {self.max_replicas} replicas: there is at least one, at most max"
            )


class Replica:
    """One verifier; Ray makes it, asks for its health, and hands it the requests."""

    def __init__(self, settings: Settings, load: Load) -> None:
        loaded = load(settings)
        self._settings, self._thread = settings, OneThread("engine")
        house = house_of(settings, loaded.engine, loaded.vocabulary, self._thread, loaded.top_ups)
        self._app = Verifier(
            Front(house, loaded.vocabulary, Keys(settings.keys) if settings.keys is not None else None)
        )
        self._watch = Watch(stopping, time.monotonic)
        self._leaving: asyncio.Task[None] | None = None

    def __serve_build_asgi_app__(self) -> Verifier:
        return self._app

    async def check_health(self) -> None:
        """Raises if this verifier steps no more: Ray then starts another one in its place."""
        self._watch.asked()
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._leave_in_time())
        stepping = self._app.stepping
        if stepping is not None and stepping.done():
            raise RuntimeError("the scheduler has ended")

    async def _leave_in_time(self) -> None:
        house = self._app.front.house
        while not await asyncio.to_thread(self._watch.is_over):  # noqa: ASYNC110 - nobody would tell
            await asyncio.sleep(CHECK_SECONDS)
        house.drain(self._settings.drain_timeout)  # those that have nothing to end go at once
        await drain(house, asyncio.Event(), self._settings.drain_timeout)


class Watch:
    """Is this replica being taken out of service? It is if the controller, which is there, asks it no more while one stops."""

    def __init__(self, stopping: Callable[[], bool], clock: Callable[[], float]) -> None:
        self._stopping, self._clock = stopping, clock
        self._last = clock()

    def asked(self) -> None:
        self._last = self._clock()

    def is_over(self) -> bool:
        """May ask the controller, and wait for its answer."""
        last = self._last
        return self._clock() - last > UNASKED * CHECK_SECONDS and self._stopping() and last == self._last


def stopping() -> bool:
    """Does the controller stop a replica of this deployment, or all of it? False if it does not answer."""
    from ray import serve

    context = serve.get_replica_context()
    try:
        application = serve.status().applications.get(context.app_name)
    except Exception:  # a controller that is being started again has not told anybody to go
        return False
    if application is None or application.status == "DELETING":
        return True
    found = application.deployments.get(context.deployment)
    return found is None or found.replica_states.get("STOPPING", 0) > 0


def verifiers(settings: Settings, load: Load, scale: Scale) -> Any:
    """A Ray Serve application: a deployment of verifiers with these settings.

    Raises PacelineError if Ray Serve is not installed, or a setting has no meaning behind its proxy.
    """
    if settings.tls_certificate is not None:
        raise PacelineError("tls_certificate: Ray's proxy is what listens; TLS is its own or that of a proxy in front")
    if settings.engine == "vllm":
        raise PacelineError(
            "engine: vllm is a server of its own, started by `paceline cloud`; a replica runs another one"
        )
    try:
        from ray import serve
        from ray.serve.config import AutoscalingConfig
    except ModuleNotFoundError as e:
        raise PacelineError(f"Ray Serve needs {e.name}: pip install 'paceline[ray]'") from None
    autoscaling = AutoscalingConfig(
        min_replicas=scale.min_replicas,
        max_replicas=scale.max_replicas,
        target_ongoing_requests=max(0.75 * settings.slots, 1.0),
        upscale_delay_s=scale.upscale_delay,
        downscale_delay_s=scale.downscale_delay,
    )
    made = serve.deployment(
        name=NAME,
        max_ongoing_requests=settings.slots,
        autoscaling_config=autoscaling,
        ray_actor_options={"num_cpus": scale.cpus, "num_gpus": scale.gpus},
        health_check_period_s=CHECK_SECONDS,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=settings.drain_timeout + MARGIN,
        **_router(scale.affinity),
    )(serve.ingress()(Replica))
    return made.bind(settings, load)


def _router(affinity: bool) -> dict[str, Any]:
    if not affinity or not _exists(ROUTER):
        return {}
    from ray.serve.config import RequestRouterConfig

    return {"request_router_config": RequestRouterConfig(request_router_class=f"{ROUTER}.ConsistentHashRouter")}


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package above it
        return False
