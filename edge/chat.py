"""The chat: asks, shows the answer as it comes, keeps the conversation.

It takes its agent, its screen and its input from outside, so that tests run whole transcripts. Slash commands are in
`commands`, what a terminal shows in `screen`.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress

from paceline.edge.agent import Agent
from paceline.edge.answer import Answer, Writer
from paceline.edge.conversation import Conversation
from paceline.edge.figures import Speed, speed
from paceline.edge.held import GoingOn, Held, Keeping
from paceline.edge.link import State
from paceline.edge.offline import DraftAlone
from paceline.edge.screen import Screen
from paceline.edge.text import Text
from paceline.protocol.errors import LinkError, PacelineError, ProtocolError
from paceline.protocol.request import GenerationRequest

PATIENCE_SECONDS = 3.0  # that a link may take to come up before the draft answers alone, where it may
LOOK_SECONDS = 0.05  # how often the link and the tree are looked at while an answer comes


class Chat:
    """A conversation with a target. `offline`: whether the draft answers alone while the verifier is away."""

    def __init__(
        self,
        agent: Agent,
        text: Text,
        conversation: Conversation,
        screen: Screen,
        *,
        stats: bool = False,
        offline: bool = False,
        keeping: Keeping | None = None,
    ) -> None:
        """`keeping`: where an unfinished answer is kept, for `go_on` in the next process."""
        self.keeping = keeping
        self.agent, self.text, self.conversation, self.screen = agent, text, conversation, screen
        self.stats, self.offline = stats, offline
        self.summary = ""  # how the last answer was made
        self._alone = False  # the last answer was the draft's own

    async def turn(self, question: str) -> None:
        """One question and its answer, which both stay in the conversation, also when the answer was stopped."""
        conversation = self.conversation
        conversation.turns.append({"role": "user", "content": conversation.question(question)})
        if self.keeping is not None:
            self.keeping.note = json.dumps(conversation.turns)
        await self._say(self._asked())

    async def go_on(self, held: Held) -> None:
        """Show the answer that another process began, all of it, and go on with it; the conversation is the one it was in."""
        assert self.keeping is not None
        self.keeping.note = held.note
        self.conversation.turns[:] = json.loads(held.note) if held.note else []
        await self._say(Answer(self.text, held), GoingOn(self.keeping, held))

    async def _say(self, answer: Answer, writer: Writer | None = None) -> None:
        conversation, said = self.conversation, ""
        try:
            writer = writer or await self._writer()
            async with aclosing(answer.pieces(writer)) as pieces:
                watching = asyncio.ensure_future(self._watch(answer))
                try:
                    async for piece in pieces:
                        said += piece.text
                        self.screen.piece(piece)
                finally:
                    watching.cancel()
                    with suppress(asyncio.CancelledError):
                        await watching
        finally:
            self.screen.end()
            if said:
                conversation.turns.append({"role": "assistant", "content": said})
            elif conversation.turns:
                conversation.turns.pop()
            self.summary = self._summary(answer)
        if self.stats:
            self.screen.say(self.summary)

    def _asked(self) -> Answer:
        c = self.conversation
        prompt = tuple(self.text.prompt(c.prompt()))
        return Answer(self.text, GenerationRequest(prompt, c.sampling, c.max_tokens, self.text.end_tokens))

    async def _writer(self) -> Writer:
        """The agent; or the draft alone, where that is wanted and the verifier is away."""
        self._alone = False
        if self.offline and self.agent.draft is not None and not await self._link_comes_up():
            self._alone = True
            self.screen.say("[offline: the draft answers alone, and this is not the target's text]")
            self.screen.mark_lines("draft| ")
            return DraftAlone(self.agent.draft, self.agent.on_draft, self.agent.clock)
        return self.keeping or self.agent

    async def _link_comes_up(self) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_SECONDS):
                while self.agent.link.state is not State.UP:  # noqa: ASYNC110 - one look in twenty of a second
                    await asyncio.sleep(LOOK_SECONDS)
        return self.agent.link.state is State.UP

    async def _watch(self, answer: Answer) -> None:
        """While an answer comes: say when the link breaks and is back, and show what is guessed of the text ahead."""
        was_up: bool | None = None  # it has not been up yet: coming up is no news
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            up = self._alone or self.agent.link.state is State.UP
            if was_up is not None and up != was_up:
                reason = self.agent.link.last_error
                self.screen.say("[connected again]" if up else f"[resuming: {reason or 'the link is down'}]")
            was_up = up if up or was_up is not None else None
            if answer.generation is not None:
                self.screen.guess(self._guess(answer))

    def _guess(self, answer: Answer) -> str:
        """The likeliest continuation that the draft sees."""
        assert answer.generation is not None
        tree, tokens = answer.generation.session.tree, []
        node = tree.root
        while children := tree.children(node):
            node = max(children, key=tree.weight)
            tokens.append(tree.token(node))
        return self.text.decode(tokens)

    @property
    def state(self) -> str:
        """The link in a word."""
        link = self.agent.link.state
        if link is State.UP:
            return "connected" if self.agent.draft is not None else "plain"
        if link is State.REFUSED:
            return "refused"
        return "resuming" if self.agent.generations else "offline"

    def _summary(self, answer: Answer) -> str:
        if answer.generation is None or not answer.count:
            return f"[no answer, link {self.state}]"
        figures = speed(answer.generation, self.agent.link.round_trip.seconds)
        if self._alone:
            return (
                f"[{answer.count} tokens, {figures.rate:.1f} tokens/s, all of them the draft's own, link {self.state}]"
            )
        return f"[{describe(figures)}, seed {self.conversation.sampling.seed}, link {self.state}]"


def describe(figures: Speed) -> str:
    """One line for people."""
    f = figures
    hidden = "" if f.hidden is None else f" ({f.hidden:.0%} hidden)"
    return (
        f"{f.tokens} tokens, {f.rate:.1f} tokens/s, plain {f.plain_rate:.1f} tokens/s, hit rate {f.hit_rate:.0%},"
        f" {f.accepted:.2f} accepted a step, round trip {1000 * f.round_trip:.0f} ms{hidden}"
    )


async def interactive(
    chat: Chat,
    read: Callable[[], Awaitable[str]],
    interrupts: "Interrupts",
    command: Callable[[str], Awaitable[bool]],
) -> None:
    """Ask and answer until the input ends, or a command says so by True. An interrupt stops the answer, which is kept."""
    while True:
        try:
            line = await read()
        except KeyboardInterrupt:
            continue
        except EOFError:
            return
        if not line.strip():
            continue
        work = command(line) if line.startswith("/") else chat.turn(line)
        task = interrupts.target = asyncio.ensure_future(work)
        try:
            if await task:
                return
        except asyncio.CancelledError:
            chat.screen.say("[stopped]")
        except ProtocolError as e:
            chat.screen.say(f"the verifier refused: {e}")
        except LinkError as e:
            chat.screen.say(f"{e}\nThe conversation is kept; ask again when the verifier is back, or leave with /bye.")
        except PacelineError as e:
            chat.screen.say(str(e))
        finally:
            interrupts.target = None


class Interrupts:
    """Ctrl-C while an answer runs cancels that task and nothing else."""

    def __init__(self) -> None:
        self.target: asyncio.Future[bool | None] | None = None

    def __call__(self) -> None:
        if self.target is not None:
            self.target.cancel()
