"""What the edge sent, put into the cloud's tree: its node numbers, late nodes, families of drawn siblings, and refusals.

A family is the siblings that were drawn from one proposal. It comes whole and before any other child of its parent, and its
nodes are offered to the target in the order in which they were drawn: their weights never rise along it, so that a plan,
which takes the likeliest nodes, takes the first of a family. Which of them a step looks at then depends on nothing that
was drawn later, as the rule of `rejection` needs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.protocol.errors import Code, ProtocolError
from paceline.protocol.followers import Followers, Place
from paceline.protocol.messages import MAX_NODES_A_DRAFT, NODE_WINDOW, WEIGHT_UNIT, Draft
from paceline.protocol.proposal import Draw, Proposal, draws
from paceline.protocol.tree import State, Tree


@dataclass(frozen=True)
class Limits:
    """What one session may ask for. `context` counts prompt and text."""

    vocabulary: int
    context: int
    nodes: int = 1024


@dataclass
class Counters:
    """Whole-session figures for metrics and tests."""

    steps: int = 0
    hits: int = 0  # steps that began with at least one node held
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    stale: int = 0


class Intake:
    """`committed` is the session's text, `tree` what is drafted beyond it; both are its own, and change under way."""

    def __init__(
        self, tree: Tree, committed: Sequence[int], limits: Limits, counters: Counters, *, drawn: bool
    ) -> None:
        """`drawn`: nodes may be draws from a proposal."""
        self.followers = Followers()  # none are noted where nodes may be draws: what is drawn is the edge's to offer
        self.draws: dict[int, Draw] = {}  # by id in the tree
        self._ceiling: dict[int, float] = {}  # by parent of draws: the log-probability of the last one
        self._tree, self._committed, self._limits, self._drawn = tree, committed, limits, drawn
        self._counters = counters
        self._refused = 0  # nodes of the draft at hand that found no room
        self.number_anew()

    def number_anew(self) -> None:
        """The edge begins to count again; what it sent stays."""
        self.followers.number_anew()
        self.nodes: dict[int, int] = {}  # the edge's node number -> id in the tree
        self.written: dict[int, int] = {}  # number of a node that came late but agreed -> text length just after it
        self.next_number = 0

    def check(self, draft: Draft, sid: int) -> None:
        """Raises ProtocolError. A draft that passes is taken, all but what finds no room."""
        if len(draft.tokens) != len(draft.parents) or len(draft.weights) not in (0, len(draft.tokens)):
            raise ProtocolError(Code.BAD_MESSAGE, "draft: parents, tokens and weights differ in length", sid)
        if draft.first > self.next_number + NODE_WINDOW:
            raise ProtocolError(Code.BAD_PARENT, f"draft: node numbers jump to {draft.first}", sid)
        token = max(max(tokens) for tokens in (draft.tokens, *(p.tokens for p in draft.proposals)) if tokens)
        if token >= self._limits.vocabulary:
            raise ProtocolError(Code.BAD_TOKEN, f"draft: token {token} is not in the vocabulary", sid)
        if max(draft.parents) > draft.first:
            for number, back in enumerate(draft.parents, draft.first):
                if back > number:
                    raise ProtocolError(
                        Code.BAD_PARENT, f"draft: node {number} has its parent {back} numbers back", sid
                    )
        if draft.proposals and (fault := self._fault(draft)):
            raise ProtocolError(Code.BAD_PROPOSAL, f"draft: {fault}", sid)

    def _fault(self, draft: Draft) -> str:
        """What is wrong with the proposals of a draft; empty if nothing is."""
        if not self._drawn:
            return "proposals in a session whose rule is not 'rejection'"
        if sum(p.nodes for p in draft.proposals) != len(draft.tokens):
            return f"the proposals are about other than {len(draft.tokens)} nodes"
        for start, end, proposal in _families(draft):
            backs, drawn = draft.parents[start:end], draft.tokens[start:end]
            if proposal.tokens and any(back != (backs[0] + i if backs[0] else 0) for i, back in enumerate(backs)):
                return f"nodes drawn from one proposal have several parents, from node {draft.first + start} on"
            if fault := proposal.fault(drawn):
                return f"the proposal of node {draft.first + start}: {fault}"
        return ""

    def take(self, draft: Draft) -> int:
        """Put the nodes of a checked draft where they belong. How many of them found no room, where there would be a place."""
        weights = draft.weights or bytes(len(draft.tokens))
        for start, end, proposal in _families(draft):
            drawn: Sequence[Draw | None] = [None] * proposal.nodes
            welcome = True
            if proposal.tokens:
                drawn = own = draws(draft.tokens[start:end], proposal)
                welcome = self._welcomes(draft, start, own)
            for i, draw in zip(range(start, end), drawn, strict=True):
                self._take_node(draft, i, -weights[i] * WEIGHT_UNIT, draw, welcome)
        self._let_go_of_old()
        self.followers.let_go(len(self._committed))
        refused, self._refused = self._refused, 0
        return refused

    def _take_node(self, draft: Draft, i: int, log_probability: float, draw: Draw | None, welcome: bool) -> None:
        number, token, back = draft.first + i, draft.tokens[i], draft.parents[i]
        if number < self.next_number:
            return  # a frame came twice, or was overtaken
        self.next_number = number + 1
        self._counters.drafted += 1
        if not self._drawn:
            place = self.followers.place(number - back) if back else self._end(draft.base_committed_len)
            self.followers.note(number, place, token, log_probability)
        length, parent = self._above(draft, i)
        committed = self._committed
        if length is not None and length < len(committed):  # late: the token after that much text is known
            if kept := committed[length] == token:
                self.written[number] = length + 1
        else:
            kept = welcome and self._grow(number, parent, token, log_probability, draw)
        self._counters.stale += not kept

    def _above(self, draft: Draft, i: int) -> tuple[int | None, int | None]:
        """What node i of a draft is to grow on: the length of the text before it, if that is its parent, and the node in the
        tree, which is the root then; None if it is gone."""
        tree, back = self._tree, draft.parents[i]
        if not back:
            return draft.base_committed_len, tree.root
        above = draft.first + i - back
        node = self.nodes.get(above)
        if node is None:
            length = self.written.get(above)
            return length, None if length is None else tree.root
        if tree.state(node) is State.COMMITTED:
            return tree.position(node) + 1, tree.root
        return None, node

    def _end(self, length: int) -> Place:
        """Where the text of that length ends. For the prompt's last token, which is not known here, -1 stands."""
        return length - 1, self._committed[length - 1] if length else -1

    def _welcomes(self, draft: Draft, at: int, drawn: Sequence[Draw]) -> bool:
        """May these draws, the nodes from `at` on, become children of their parent? As its first, or where they are already."""
        _, parent = self._above(draft, at)
        if parent is None or self._tree.state(parent) is not State.LIVE:
            return False
        held = self._tree.children(parent)
        return all(self.draws.get(node) == draw for node, draw in zip(held, drawn, strict=False))

    def _grow(self, number: int, parent: int | None, token: int, log_probability: float, draw: Draw | None) -> bool:
        """Put a node below a live `parent`. False if that place is gone, or there is no room."""
        tree = self._tree
        if parent is None or tree.state(parent) is not State.LIVE:
            return False
        node = tree.child(parent, token)  # after a resume the edge sends again what is still here
        if node is None:
            if len(tree) >= self._limits.nodes:
                self._refused += 1
                return False
            log_probability = min(log_probability, self._ceiling.get(parent, 0.0))
            node = tree.add(parent, token, log_probability)
            if draw is not None:
                self.draws[node], self._ceiling[parent] = draw, log_probability
        self.nodes[number] = node
        return True

    def _let_go_of_old(self) -> None:
        if len(self.nodes) + len(self.written) > 2 * NODE_WINDOW:
            oldest = self.next_number - NODE_WINDOW
            self.nodes = {k: v for k, v in self.nodes.items() if k >= oldest}
            self.written = {k: v for k, v in self.written.items() if k >= oldest}
        if len(self.draws) > 2 * len(self._tree) + MAX_NODES_A_DRAFT:
            live = self._tree.state
            self.draws = {n: d for n, d in self.draws.items() if live(n) is State.LIVE}
            self._ceiling = {n: least for n, least in self._ceiling.items() if live(n) is State.LIVE}


def _families(draft: Draft) -> Iterator[tuple[int, int, Proposal]]:
    """(first node, end, proposal) of each family of a draft; without proposals all its nodes were picked."""
    start = 0
    for proposal in draft.proposals or (Proposal(len(draft.tokens)),):
        yield start, start + proposal.nodes, proposal
        start += proposal.nodes
