"""A replica of Ray Serve, without Ray: what it is given, when it takes itself for leaving, and what it then says.

What only a running Ray can tell is `scripts/test_ray`.
"""

import asyncio
import importlib.util
from pathlib import Path

import pytest
from paceline.cloud import ray_serve
from paceline.cloud.engines.toy import ToyEngine
from paceline.cloud.ray_serve import CHECK_SECONDS, UNASKED, Loaded, Replica, Scale, Watch, verifiers
from paceline.cloud.scheduler import Seat
from paceline.cloud.settings import Settings
from paceline.protocol.codec import encode
from paceline.protocol.errors import PacelineError
from paceline.protocol.messages import Goaway, Hello, Message, Open
from paceline.protocol.sampling import Sampling
from paceline.scripts.ray_app import arguments, load
from test_asgi import Caller, scope, until


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("stopping", [True, False])
def test_who_is_not_asked_while_one_is_stopping_is_leaving(stopping: bool) -> None:
    clock, questions = Clock(), list[float]()
    watch = Watch(lambda: bool(questions.append(clock.now)) or stopping, clock)
    for _ in range(20):
        clock.now += CHECK_SECONDS
        watch.asked()
        assert not watch.is_over()
    assert not questions, "the controller is not bothered by those that it asks"
    clock.now += UNASKED * CHECK_SECONDS + 0.1
    assert watch.is_over() == stopping
    watch.asked()
    assert not watch.is_over()


def test_who_is_asked_again_meanwhile_stays() -> None:
    clock = Clock()

    def stopping() -> bool:
        clock.now += 1.0
        watch.asked()
        return True

    watch = Watch(stopping, clock)
    clock.now += UNASKED * CHECK_SECONDS + 0.1
    assert not watch.is_over()


class Visitor:
    """A connection, as far as the house knows it."""

    id = "visitor"

    def __init__(self) -> None:
        self.heard: list[Message] = []

    def send(self, message: Message) -> None:
        self.heard.append(message)

    def give_up(self, seat: Seat) -> None:
        raise AssertionError("nobody resumes here")


def toy(settings: Settings) -> Loaded:
    return Loaded(ToyEngine(context=settings.context))


async def test_a_replica_that_leaves_tells_its_edges_and_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_serve, "CHECK_SECONDS", 0.01)
    leaving = False
    monkeypatch.setattr(ray_serve, "stopping", lambda: leaving)
    replica, visitor = Replica(Settings(engine="toy", drain_timeout=7.0), toy), Visitor()
    app = replica.__serve_build_asgi_app__()
    house = app.front.house
    house.open_connections[visitor] = None
    caller = Caller({"type": "lifespan.startup"})
    living = asyncio.create_task(app({"type": "lifespan"}, caller.receive, caller.send))
    await until(lambda: bool(caller.sent))
    await replica.check_health()
    await asyncio.sleep(0.2)
    assert not visitor.heard
    leaving = True
    await until(lambda: bool(visitor.heard))
    assert isinstance(visitor.heard[0], Goaway)
    assert visitor.heard[0].drain == 7.0
    page = app.front.answer("/", None, websocket=True)
    assert page is not None
    assert page.status == 503
    caller.inbox.put_nowait({"type": "lifespan.shutdown"})
    await living
    with pytest.raises(RuntimeError, match="scheduler"):
        await replica.check_health()


async def test_a_replica_has_the_backup_that_the_settings_name() -> None:
    app = Replica(arguments({"engine": "toy", "backup": "ngram"})[0], load).__serve_build_asgi_app__()
    life, edge = Caller({"type": "lifespan.startup"}), Caller({"type": "websocket.connect"})
    own = app.front.house.vocabulary
    for message in (
        Hello(versions=(1,), vocabulary="toy", vocabulary_size=own.size, fingerprint=own.fingerprint),
        Open(sid=1, prompt=(1,), sampling=Sampling(), max_tokens=400),  # the toy's greedy text soon repeats itself
    ):
        edge.inbox.put_nowait({"type": "websocket.receive", "bytes": encode(message)})
    tasks = [
        asyncio.create_task(app({"type": "lifespan"}, life.receive, life.send)),
        asyncio.create_task(app(scope(), edge.receive, edge.send)),
    ]
    figures = app.front.house.scheduler.figures
    await until(lambda: figures.tokens == 400)
    assert figures.verified > 0, "nobody else drafts here"
    edge.inbox.put_nowait({"type": "websocket.disconnect"})
    life.inbox.put_nowait({"type": "lifespan.shutdown"})
    await asyncio.gather(*tasks)


def test_arguments_are_settings_and_scale() -> None:
    settings, scale = arguments({"engine": "toy", "slots": "3", "min_replicas": "2", "gpus": 0.5, "affinity": "false"})
    assert (settings.engine, settings.slots) == ("toy", 3)
    assert (scale.min_replicas, scale.gpus, scale.affinity) == (2, 0.5, False)
    loaded = load(settings)
    assert loaded.engine.name == ToyEngine().name
    assert loaded.vocabulary is None
    assert not loaded.top_ups
    for wrong, said in (
        ({"slot": 3}, "no setting 'slot'"),
        ({"slots": 0}, "slots"),
        ({"min_replicas": "many"}, "min_replicas"),
        ({"min_replicas": 9}, "9 to 8 replicas"),
    ):
        with pytest.raises(PacelineError, match=said):
            arguments(wrong)


@pytest.mark.parametrize("router", ["json.router", "json.decoder.router", "json.routers.consistent"])
def test_a_ray_without_the_router_goes_without_it(router: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_serve, "ROUTER", router)
    assert ray_serve._router(affinity=True) == {}


def test_what_cannot_be_is_said(tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match="vllm"):
        verifiers(Settings(engine="vllm"), toy, Scale())
    with pytest.raises(PacelineError, match="tls_certificate"):
        verifiers(Settings(tls_certificate=tmp_path), toy, Scale())
    if importlib.util.find_spec("ray") is None:
        with pytest.raises(PacelineError, match=r"paceline\[ray\]"):
            verifiers(Settings(), toy, Scale())
