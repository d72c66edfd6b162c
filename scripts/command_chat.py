"""`paceline chat`: talk to a target through a verifier, here or elsewhere."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from paceline.scripts import options

if TYPE_CHECKING:
    from paceline.edge.chat import Chat
    from paceline.edge.conversation import Conversation
    from paceline.edge.runtime import Settings
    from paceline.edge.screen import Screen

ATTEMPTS = 8  # to reach a verifier, before the chat ends


def chat(
    url: options.Urls = None,
    key: options.Key = None,
    insecure: options.Insecure = False,
    authority: options.Authority = None,
    certificate: options.Certificate = None,
    local: options.Local = False,
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", help="Answer this and stop.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message before the conversation.")] = None,
    pair: options.Pair = "smollm2",
    target: options.Target = None,
    draft: options.Draft = None,
    policy: options.PolicyName = "stream",
    rule: options.Rule = "coupled",
    max_tokens: options.MaxTokens = 512,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    seed: options.Seed = None,
    stats: Annotated[bool, typer.Option("--stats", help="Say after each answer how it was made.")] = False,
    color: Annotated[bool, typer.Option("--color", help="Show which tokens the draft had right, in colour.")] = False,
    optimistic: Annotated[
        bool, typer.Option("--optimistic", help="Show dimmed what is drafted ahead, and correct it.")
    ] = False,
    offline: options.Offline = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the answer during which this command was killed.")
    ] = False,
    power: options.Power = "full",
    threads: options.Threads = None,
    provider: options.Provider = None,
    rtt: options.RoundTrip = 0.0,
    verify_floor: options.VerifyFloor = 0.0,
) -> None:
    """Chat. Ctrl-C stops an answer, Ctrl-D leaves. Piped input is one question."""
    import asyncio

    from paceline.edge.conversation import Conversation
    from paceline.edge.policies import policy as policy_named
    from paceline.edge.policies import with_power, with_rule
    from paceline.protocol.errors import PacelineError
    from paceline.scripts.verifier import Choice, settings_of, verifier

    policy = with_rule(with_power(policy, power), rule)
    chosen = policy_named(policy)
    params = options.sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed)
    alone = options.alone(offline, chosen.drafts, policy)
    if prompt is None and not resume and not sys.stdin.isatty():
        prompt = sys.stdin.read()
    if prompt is not None and not prompt.strip():
        raise PacelineError("the prompt is empty")
    door = (url or (), key, insecure, authority, certificate)
    choice = Choice(*door, local, pair, target, draft, threads, verify_floor, chosen.drafts, alone=alone)
    with verifier(choice) as place:
        attempts = None if alone else ATTEMPTS
        settings = settings_of(place, threads, rtt, attempts, provider)
        conversation = Conversation(params, max_tokens, system)
        shown = Shown(stats, color, optimistic, alone, resume)
        asyncio.run(_talk(settings, policy, conversation, prompt, shown))


@dataclass(frozen=True)
class Shown:
    """How answers are shown."""

    stats: bool
    color: bool
    optimistic: bool
    offline: bool
    resume: bool = False  # begin with the answer that was not finished


async def _talk(
    settings: "Settings", policy: str, conversation: "Conversation", prompt: str | None, shown: Shown
) -> None:
    import time

    from paceline.edge.chat import Chat
    from paceline.edge.held import Keeping, read_held
    from paceline.edge.policies import policy as policy_named
    from paceline.edge.runtime import running_agent
    from paceline.edge.text import Text
    from paceline.protocol.errors import PacelineError

    text = Text(settings.vocabulary)
    async with running_agent(settings, text, policy_named(policy)) as agent:
        path = settings.cache / "unfinished.json"
        keeping = Keeping(agent, path, time.perf_counter, fingerprint=text.vocabulary.fingerprint)
        chat = Chat(
            agent, text, conversation, _screen(shown), stats=shown.stats, offline=shown.offline, keeping=keeping
        )
        if shown.resume:
            if (held := read_held(path)) is None:
                raise PacelineError("there is no unfinished answer to go on with")
            await chat.go_on(held)
            if prompt is None and not sys.stdin.isatty():
                return
        if prompt is not None:
            await chat.turn(prompt)
        else:
            await _converse(chat, settings.cache)


def _screen(shown: Shown) -> "Screen":
    """Colour and guesses are for terminals, and colour for those who want it (https://no-color.org)."""
    from paceline.edge.screen import Screen

    terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    plain = bool(os.environ.get("NO_COLOR"))
    return Screen(
        _write,
        lambda line: print(line, file=sys.stderr, flush=True),
        color=shown.color and terminal and not plain,
        guesses=shown.optimistic and terminal,
        shared=sys.stdout.isatty(),
        width=_columns,
    )


def _columns() -> int:
    """The terminal's own answer: what COLUMNS says may be of another time, or another terminal."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


async def _converse(chat: "Chat", cache: Path) -> None:
    import asyncio
    import signal

    from paceline.edge.chat import Interrupts, interactive
    from paceline.edge.commands import Commands
    from paceline.edge.terminal import Reader
    from platformdirs import user_data_path

    interrupts = Interrupts()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupts)
    saved = Path(os.environ.get("PACELINE_DATA") or user_data_path("paceline")) / "conversations"
    print("/? lists the commands, Ctrl-C stops an answer, Ctrl-D leaves.", file=sys.stderr)
    await interactive(chat, Reader(cache / "chat_history", saved), interrupts, Commands(chat, saved))
