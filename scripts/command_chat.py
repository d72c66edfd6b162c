"""`paceline chat`: talk to a target through a verifier, here or elsewhere."""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from paceline.scripts import options

if TYPE_CHECKING:
    from paceline.edge.chat import Chat
    from paceline.edge.runtime import Settings
    from paceline.protocol.sampling import Sampling


def chat(
    url: Annotated[
        list[str] | None,
        typer.Option(help="A verifier, wss://host:port; given again: others, tried when it cannot be reached."),
    ] = None,
    key: Annotated[str | None, typer.Option(envvar="PACELINE_KEY", help="The key that lets this device in.")] = None,
    insecure: Annotated[bool, typer.Option(help="Allow ws:// to another machine: nothing is encrypted.")] = False,
    authority: Annotated[Path | None, typer.Option(help="Certificates to trust instead of the system's.")] = None,
    certificate: Annotated[
        Path | None, typer.Option(help="This device's own certificate and key, for mutual TLS.")
    ] = None,
    local: Annotated[
        bool, typer.Option("--local", help="Start a verifier on this machine for as long as this runs.")
    ] = False,
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", help="Answer this and stop.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message before the conversation.")] = None,
    pair: options.Pair = "smollm2",
    target: options.Target = None,
    draft: options.Draft = None,
    policy: options.PolicyName = "stream",
    max_tokens: options.MaxTokens = 512,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    seed: options.Seed = None,
    stats: Annotated[bool, typer.Option("--stats", help="Say after each answer how it was made.")] = False,
    threads: options.Threads = None,
    rtt: options.RoundTrip = 0.0,
    verify_floor: options.VerifyFloor = 0.0,
) -> None:
    """Chat. Ctrl-C stops an answer, Ctrl-D leaves. Piped input is one question."""
    import asyncio

    from paceline.edge.policies import policy as policy_named
    from paceline.edge.runtime import Settings
    from paceline.edge.vocabulary_cache import vocabulary_file
    from paceline.edge.websocket import Address
    from paceline.protocol.errors import PacelineError
    from paceline.quant.landing import disk_errors
    from paceline.scripts.local import local_verifier
    from paceline.scripts.models import cache_folder
    from paceline.scripts.pairs import draft_of, files_of, vocabulary_of

    chosen = policy_named(policy)
    params = options.sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed)
    if bool(url) == local:
        raise PacelineError("say where the verifier is: --url ws://host:port, or --local to start one here")
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read()
    if prompt is not None and not prompt.strip():
        raise PacelineError("the prompt is empty")
    with disk_errors(cache_folder()):
        cache_folder().mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        if url:
            addresses = tuple(Address(u, key, insecure, authority, certificate) for u in url)
            vocabulary = vocabulary_file(addresses, cache_folder())
            drafts_with = draft_of(pair, draft) if chosen.drafts else None
        else:
            files = files_of(pair, target, draft)
            floor = ["--verify-floor", str(verify_floor), *(["--threads", str(threads)] if threads else [])]
            addresses = (Address(stack.enter_context(local_verifier(["--model", str(files.target), *floor]))),)
            vocabulary, drafts_with = vocabulary_of(files.target), files.draft
        settings = Settings(addresses, vocabulary, drafts_with, cache_folder(), threads, rtt)
        asyncio.run(_talk(settings, policy, params, max_tokens, prompt, system, stats))


async def _talk(
    settings: "Settings",
    policy: str,
    params: "Sampling",
    max_tokens: int,
    prompt: str | None,
    system: str | None,
    stats: bool,
) -> None:
    from paceline.edge.chat import Chat, say_aside, write_out
    from paceline.edge.policies import policy as policy_named
    from paceline.edge.runtime import running_agent
    from paceline.edge.text import Text

    text = Text(settings.vocabulary)
    async with running_agent(settings, text, policy_named(policy)) as agent:
        chat = Chat(agent, text, params, max_tokens, write_out, say_aside, stats)
        if system is not None:
            chat.turns.append({"role": "system", "content": system})
        if prompt is not None:
            await chat.turn(prompt)
        else:
            await _converse(chat, settings.cache)


async def _converse(chat: "Chat", cache: Path) -> None:
    import asyncio
    import signal

    from paceline.edge.chat import Interrupts, interactive
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory

    interrupts = Interrupts()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupts)
    session: PromptSession[str] = PromptSession(history=FileHistory(str(cache / "chat_history")))
    print("Ctrl-C stops an answer, Ctrl-D leaves.", file=sys.stderr)
    await interactive(chat, lambda: session.prompt_async(">>> ", handle_sigint=False), interrupts)
