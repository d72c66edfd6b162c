"""`paceline edge`: the local server that any OpenAI client uses."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer
from paceline.scripts import options

if TYPE_CHECKING:
    from paceline.edge.runtime import Settings

CLIENT_KEYS = "PACELINE_CLIENT_KEY"


def edge(
    url: options.Urls = None,
    key: options.Key = None,
    insecure: options.Insecure = False,
    authority: options.Authority = None,
    certificate: options.Certificate = None,
    local: options.Local = False,
    host: Annotated[str, typer.Option(help="Address to listen on; the default is this machine alone.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any that is free.")] = 8080,
    name: Annotated[
        str | None, typer.Option(help="What the model is called; the verifier's name if not given.")
    ] = None,
    client_key: Annotated[
        list[str] | None,
        typer.Option(envvar=CLIENT_KEYS, help="A key clients must send; may be given again. Without one, any will do."),
    ] = None,
    origin: Annotated[
        list[str] | None,
        typer.Option(help="A web page's origin that may use the server; may be given again, '*' is any."),
    ] = None,
    patience: Annotated[
        float, typer.Option(min=0, max=600, help="Seconds a request waits for a verifier that is away.")
    ] = 10.0,
    offline: options.Offline = None,
    pair: options.Pair = "smollm2",
    target: options.Target = None,
    draft: options.Draft = None,
    policy: options.PolicyName = "stream",
    power: options.Power = "full",
    threads: options.Threads = None,
    provider: options.Provider = None,
    rtt: options.RoundTrip = 0.0,
    verify_floor: options.VerifyFloor = 0.0,
    stop_with_stdin: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Serve an OpenAI-compatible API and a page on this machine. Ctrl-C stops.

    Point any client at http://127.0.0.1:8080/v1, with any key; open http://127.0.0.1:8080/ to chat and watch.
    """
    import asyncio

    from paceline.edge.policies import policy as policy_named
    from paceline.edge.policies import with_power
    from paceline.protocol.errors import PacelineError
    from paceline.scripts.verifier import Choice, settings_of, verifier

    policy = with_power(policy, power)
    chosen = policy_named(policy)
    alone = options.alone(offline, chosen.drafts, policy)
    keys = frozenset(client_key or ())
    if any(not k.strip() for k in keys):
        raise PacelineError("a client's key is empty; leave --client-key out to accept any")
    door = (url or (), key, insecure, authority, certificate)
    choice = Choice(*door, local, pair, target, draft, threads, verify_floor, chosen.drafts, True, alone)
    with verifier(choice) as place:
        settings = settings_of(place, threads, rtt, None, provider)
        asyncio.run(_serve(settings, policy, host, port, name, keys, origin or [], patience, alone, stop_with_stdin))


async def _serve(
    settings: "Settings",
    policy: str,
    host: str,
    port: int,
    name: str | None,
    keys: frozenset[str],
    origins: list[str],
    patience: float,
    alone: bool,
    stop_with_stdin: bool,
) -> None:
    import asyncio
    import signal
    from contextlib import suppress

    from paceline.edge.api.app import application
    from paceline.edge.api.service import Service, model_id
    from paceline.edge.policies import policy as policy_named
    from paceline.edge.runtime import running_agent
    from paceline.edge.serve import is_loopback, serve_until_stopped
    from paceline.edge.text import Text
    from paceline.scripts.local import READY, when_stdin_ends
    from paceline.scripts.version import installed

    if not is_loopback(host) and not keys:
        typer.echo(f"paceline: anybody who reaches {host} may use this server; --client-key asks for a key", err=True)
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(NotImplementedError):
            loop.add_signal_handler(number, stop.set)
    if stop_with_stdin:
        when_stdin_ends(stop.set)
    text = Text(settings.vocabulary)
    async with running_agent(settings, text, policy_named(policy)) as agent:
        service = Service(
            agent, text, name or model_id(text.vocabulary.name), installed() or "checkout", keys, patience, alone
        )
        await serve_until_stopped(
            application(service, origins), host, port, lambda address: print(f"{READY}{address}", flush=True), stop
        )
    sys.stdout.flush()
