"""An edge of a fleet: the device's side of the protocol and its planner as they are, its draft read from a book.

Session, tree, planner and codec are the real ones. The draft's rows cost what the preset says, and their candidates were
recorded; nothing is computed again for each of thousands of edges. One answer follows another.
"""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from paceline.edge.agent import ACK_EVERY
from paceline.edge.drafter import MAX_ROWS
from paceline.edge.generation import NODES_LEFT, STREAMED
from paceline.edge.planner import MARGIN, Horizon, Switch, bar, patience, to_run, to_send
from paceline.edge.rounds import NEXT_CHANCE
from paceline.protocol.channel import ChannelClosed
from paceline.protocol.codec import decode_from_cloud, encode
from paceline.protocol.cost import StepCost, best_count
from paceline.protocol.edge_session import Committed, EdgeSession, Phase
from paceline.protocol.messages import Commit, Error, Hello, Message, Opened, Welcome
from paceline.protocol.tree import State
from paceline.scripts.lab.book import Book, Page
from paceline.scripts.lab.edges import EdgeCost
from paceline.scripts.lab.virtual import MemoryChannel

LIVE = (Phase.OPENING, Phase.RUNNING)
NODES = 1024  # a session holds at the cloud, as the verifier's default


@dataclass
class Diary:
    """What came to an edge: (when, tokens) of commits, answers begun, whole and altered."""

    commits: list[tuple[float, int]] = field(default_factory=list)
    breaks: set[int] = field(default_factory=set)  # indices of first commits of answers
    whole: int = 0
    altered: int = 0
    refused: int = 0


class CrowdEdge:
    def __init__(
        self, channel: MemoryChannel, books: Iterable[Book], cost: EdgeCost, one_way: float, *, drafts: bool
    ) -> None:
        """`books`: what is asked, one after another. `one_way` in seconds."""
        self._channel, self._books, self._cost = channel, iter(books), cost
        self._one_way, self._drafts = one_way, drafts
        self._step_cost = StepCost(cost.table)
        self._loop = asyncio.get_running_loop()
        self._sid, self._switch, self._step = 0, Switch(), 0.0
        self.diary = Diary()

    async def talk(self, hello: Hello, after: float) -> None:
        """From `after` seconds on, until the link ends."""
        await asyncio.sleep(after)
        self._send(hello)
        with suppress(ChannelClosed):
            while True:
                frame = await self._channel.receive()
                self._loop.call_later(self._one_way, self._receive, frame)

    def _send(self, message: Message) -> None:
        self._loop.call_later(self._one_way, self._put, encode(message))

    def _put(self, frame: bytes) -> None:
        with suppress(ChannelClosed):
            self._channel.put(frame)

    # ---- what the cloud says

    def _receive(self, frame: bytes | str) -> None:
        message = decode_from_cloud(frame)
        if isinstance(message, Welcome):
            self._ask()
            return
        events = self.session.receive(message)
        match message:
            case Opened():
                self._send_nodes()
                self._draft()
            case Commit():
                self._committed(events)
            case Error():
                self.diary.refused += 1
                self._loop.call_later(message.retry_after or 1.0, self._open)

    def _ask(self) -> None:
        self._book = next(self._books)
        self.session = EdgeSession(self._book.case.request)
        tree, now = self.session.tree, self._loop.time()
        self._pages: dict[int, Page] = {tree.root: self._book.along[0]}
        self._weight = {tree.root: tree.weight(tree.root)}
        self._frontier, self._unsent, self._busy = {tree.root}, set[int](), False
        self._horizon = Horizon(begun=now + self._one_way, step=self._step, missed=now + self._one_way)
        if self._drafts and self._step > 0:
            found = patience(2 * self._one_way, self._cost(1), NEXT_CHANCE, STREAMED / self._step)
            self.session.patience = self._horizon.patience = found
        self.diary.breaks.add(len(self.diary.commits))
        self._open()
        self._draft()  # there is time to draft while it opens

    def _open(self) -> None:
        self._sid += 1
        self._send(self.session.open(self._sid))

    def _committed(self, events: Sequence[Committed]) -> None:
        now, session = self._loop.time(), self.session
        for event in events:
            self.diary.commits.append((now, len(event.tokens)))
            self._horizon.observe(now - self._one_way, event.commit.step, len(event.tokens))
            self._step = self._horizon.step
            self._switch.observe(event.commit.accepted)
        if session.phase is Phase.DONE:
            self._end()
        elif self._drafts:
            self._move_on()
            self._send_nodes()
            self._draft()
        elif len(session.committed) // ACK_EVERY != (len(session.committed) - len(events[-1].tokens)) // ACK_EVERY:
            self._send(session.ack())

    def _end(self) -> None:
        if tuple(self.session.committed) == self._book.case.text:
            self.diary.whole += 1
        else:
            self.diary.altered += 1
        self._ask()

    def _move_on(self) -> None:
        tree = self.session.tree
        self._pages = {n: page for n, page in self._pages.items() if tree.state(n) is State.LIVE}
        if tree.root not in self._pages:  # the target left the tree, or went where nothing was recorded
            self._pages[tree.root] = self._book.along[len(self.session.committed)]
        self._weight[tree.root] = tree.weight(tree.root)
        self._frontier = {n for n in self._frontier if tree.state(n) is State.LIVE}
        if not tree.children(tree.root) and tree.position(tree.root) + 2 < self.session.max_tokens:
            self._frontier.add(tree.root)
        self._unsent = {n for n in self._unsent if tree.state(n) is State.LIVE and n != tree.root}
        self._horizon.keep(tree)

    # ---- drafting

    def _draft(self) -> None:
        """Begin a batch of rows, unless one is under way or none pays."""
        if self._busy or not self._drafts or not self._switch.drafting or self.session.phase not in LIVE:
            return
        tree, row = self.session.tree, self._cost(1)
        if len(tree) + NODES_LEFT > NODES:
            return
        at = self._loop.time() + row + self._one_way
        least = bar(self._cost.more, self._horizon.step).run
        found = to_run(tree, self._horizon, self._worth(self._frontier, least), at, row, MAX_ROWS, least)
        if not found:
            self._send_nodes()
            return
        count = max(best_count([useful for useful, _ in found], self._step_cost), 1)
        self._busy = True
        nodes = [node for _, node in found[:count]]
        self._loop.call_later(self._cost(count), self._ran, self.session, nodes, self._cost(count))

    def _ran(self, session: EdgeSession, nodes: Sequence[int], seconds: float) -> None:
        if session is not self.session:
            return  # the answer has ended meanwhile
        self._step_cost.learn(len(nodes), seconds)
        self._busy, tree = False, session.tree
        for node in nodes:
            if tree.state(node) is not State.LIVE:
                continue
            self._frontier.discard(node)
            page = self._pages.get(node)
            if page is None or tree.position(node) + 2 >= session.max_tokens:
                continue
            for token, chance in page.candidates:
                child = tree.add(node, token, chance)
                self._weight[child] = tree.weight(child)
                self._unsent.add(child)
                self._frontier.add(child)
                if (below := page.next.get(token)) is not None:
                    self._pages[child] = below
        self._send_nodes(seconds)
        self._draft()

    def _worth(self, nodes: Iterable[int], least: float) -> list[int]:
        """Those whose reach is above `least`, which the planner would look at; cheaper, and most are not."""
        weight, tree = self._weight, self.session.tree
        bound = least + weight[tree.root]
        return [n for n in nodes if weight[n] > bound]

    def _send_nodes(self, wait: float = 0.0) -> None:
        """`wait`: seconds until there is another occasion; what need not leave before then waits for it."""
        if self.session.phase is not Phase.RUNNING:
            return
        tree, arrival = self.session.tree, self._loop.time() + self._one_way
        if wait and not self._horizon.starts_between(arrival - MARGIN, arrival + wait + MARGIN):
            return
        ready: dict[int, None] = {}
        least = bar(self._cost.more, self._horizon.step).send
        for node in to_send(tree, self._horizon, sorted(self._worth(self._unsent, least)), arrival, least):
            ready.update(dict.fromkeys(n for n in tree.path(node) if n in self._unsent))
        if not ready:
            return
        self._unsent -= ready.keys()
        self._horizon.sent(ready, arrival)
        for message in self.session.send(ready):
            self._send(message)
