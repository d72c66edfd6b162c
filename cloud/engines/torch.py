"""The reference target: torch, a paged KV cache, one batched forward over all sessions' rows, choice and walk on the device.

One step is: make room, lay the rows out, run the decoder once, walk every tree along the target's own choices, move the keys
and values of accepted nodes to their final slots. What goes wrong for one session (no room, logits that are not finite,
memory) ends that session and no other. Only paths, and the log-probabilities somebody asked for, leave the device.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from msgspec.structs import replace
from paceline.cloud.architecture import Config
from paceline.cloud.batch import Batch, Share, choices, forest, lay_out
from paceline.cloud.engine import Blocks, Logits, Work
from paceline.cloud.engine import walk as walk_on_host
from paceline.cloud.kv import Cache
from paceline.cloud.logprobs import top_logprobs
from paceline.cloud.model import Rows, Weights, forward
from paceline.kernels.choice import Paths
from paceline.kernels.layout import PAGE, Layout, prefix_slots
from paceline.kernels.suite import Suite
from paceline.protocol.cloud_session import Plan, Walk
from paceline.protocol.errors import EngineError
from paceline.protocol.vocabulary import Vocabulary
from torch import Tensor

MAX_NODES = 1024  # drafted nodes in one step, over all sessions
CHUNK = 256  # prompt tokens in one step, over all sessions: a long prompt stalls the others by no more
MAX_ROWS = 4096  # rows in one forward; a larger step runs as several

Outcome = Walk | EngineError | None
Forward = Callable[[Rows, Layout], Tensor]  # the decoder over a step's rows: logits [N, V]


@dataclass(frozen=True)
class Decoder:
    """A loaded model: what `cloud.model.forward` needs apart from the step itself."""

    config: Config
    weights: Weights
    vocabulary: Vocabulary
    device: torch.device
    suite: Suite
    exact: bool


@dataclass
class Timing:
    """Seconds of the last `verify`, and its rows.

    `run` is planning and the decoder; on CUDA it covers the launch alone, unless the clock waits for the device.
    """

    rows: int = 0
    planning: float = 0.0  # of the attention, from the layout
    run: float = 0.0
    total: float = 0.0

    @property
    def forward(self) -> float:
        return self.run - self.planning

    @property
    def outside(self) -> float:
        """All of the step that is not the decoder's arithmetic."""
        return self.total - self.forward


class TorchEngine:
    rejects = True  # a session with draws walks on the host, by the rows of its path

    def __init__(
        self,
        decoder: Decoder,
        cache: Cache,
        context: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.name = "torch"
        self.vocabulary = decoder.vocabulary
        self.context = context
        self.free_width = 0
        self.max_width, self.chunk = MAX_NODES, CHUNK
        self.step_cost: Sequence[tuple[int, float]] = ((1, 1e-3),)
        self.decoder, self.cache = decoder, cache
        self.timing = Timing()
        self.run: Forward = self.eager
        self._clock = clock

    def open(self, tokens: Sequence[int]) -> int:
        return self.cache.open(tokens)

    def length(self, handle: int) -> int:
        """May shrink between steps: an idle sequence gives its last pages up under pressure and is rebuilt from its tokens."""
        return self.cache.length(handle)

    def close(self, handle: int) -> None:
        self.cache.close(handle)

    @property
    def blocks(self) -> Blocks:
        """Pages of the cache; one that several sequences share is counted once."""
        pages = self.cache.pages
        return Blocks(pages.in_use, pages.total, PAGE)

    @torch.inference_mode()
    def verify(self, batch: Sequence[Work]) -> list[Outcome]:
        began = self._clock()
        self.timing = Timing()
        self.cache.tick()
        results: dict[int, Outcome] = {}
        admitted = self._admit(batch, results)
        if admitted:
            self._step(admitted, results)
        self.timing.total = self._clock() - began
        return [results[work.handle] for work in batch]

    # ---- the parts of a step

    def _admit(self, batch: Sequence[Work], results: dict[int, Outcome]) -> list[Share]:
        """Those works that there is room for; without their nodes, if only that leaves room."""
        needed = {work.handle for work in batch}
        assert len(needed) == len(batch), "one work a handle"
        fitted = []
        for work in batch:
            fit = self._fit(work, needed)
            if isinstance(fit, EngineError):
                results[work.handle] = fit
            else:
                fitted.append(fit)
        return [Share.of(work, self.cache.held(work.handle)) for work in fitted]

    def _fit(self, work: Work, needed: set[int]) -> Work | EngineError:
        assert work.tokens, "a work has tokens"
        base = self.cache.length(work.handle) + len(work.tokens)
        if base > self.context:
            return EngineError(f"the text grew to {base} tokens; the context here is {self.context}")
        bare = replace(work, plan=Plan())
        if base + len(work.plan.tokens) > self.context:
            work = bare
        if self.cache.reserve(work.handle, base + len(work.plan.tokens), needed):
            return work
        if self.cache.reserve(work.handle, base, needed):
            return bare
        self.cache.pages.commit(self.cache.held(work.handle), ())
        return EngineError(f"no memory is left for {base} tokens of context beside the other sessions; try again later")

    def _step(self, shares: list[Share], results: dict[int, Outcome]) -> None:
        """Run the shares in one forward; in halves where they are too many, or memory does not suffice for all at once."""
        if len(shares) > 1 and sum(s.rows for s in shares) > MAX_ROWS:
            return self._step_in_halves(shares, results)
        batch = lay_out(shares, self.decoder.exact)
        try:
            logits = self.logits(batch)
            paths = self._walk(batch, logits) if batch.choosing else None
        except Exception as e:
            if not out_of_memory(e):
                raise
            failure = str(e).splitlines()[0]
        else:
            return self._settle(batch, logits, paths, results)
        if len(shares) > 1:
            return self._step_in_halves(shares, results)
        self.cache.pages.commit(self.cache.held(shares[0].work.handle), ())
        text = f"this device has too little memory for a step of {shares[0].rows} rows ({failure}); try again later"
        results[shares[0].work.handle] = EngineError(text)

    def _step_in_halves(self, shares: list[Share], results: dict[int, Outcome]) -> None:
        half = len(shares) // 2
        self._step(shares[:half], results)
        self._step(shares[half:], results)

    def logits(self, batch: Batch) -> Tensor:
        """Logits [N, V] of the rows whose choice is wanted."""
        with self._timed(batch):
            columns = (batch.tokens, batch.layout.positions, batch.slots, batch.asked)
            rows = Rows(*(torch.from_numpy(c).to(self.decoder.device) for c in columns))
            return self.run(rows, batch.layout)

    def eager(self, rows: Rows, layout: Layout) -> Tensor:
        """The forward as it comes, for any shape."""
        d = self.decoder
        began = self._clock()
        plan = d.suite.plan(layout, frozenset(d.config.windows), d.device)
        self.timing.planning += self._clock() - began
        return forward(d.weights, d.config, rows, self.cache.keys, self.cache.values, plan, d.suite)

    def _walk(self, batch: Batch, logits: Tensor) -> Paths:
        """The walks, on the host."""
        device = self.decoder.device
        picked = choices(batch, logits.shape[1], device)
        paths = self.decoder.suite.walk(logits, forest(batch, device), picked)
        return Paths(*(t.cpu() for t in (paths.rows, paths.count, paths.token, paths.finite)))

    def _settle(self, batch: Batch, logits: Tensor, paths: Paths | None, results: dict[int, Outcome]) -> None:
        """Results of a step, and its accepted tokens into the cache."""
        walks = self._walks(batch, logits, paths) if paths is not None else {}
        self._move(batch, walks)
        for share in batch.shares:
            work, held = share.work, self.cache.held(share.work.handle)
            outcome = results[work.handle] = walks.get(work.handle)
            if isinstance(outcome, EngineError):
                self.cache.forget(work.handle)
                continue
            accepted = outcome.accepted if outcome is not None else ()
            self.cache.pages.commit(held, (*work.tokens, *(work.plan.tokens[i] for i in accepted)))

    def _walks(self, batch: Batch, logits: Tensor, paths: Paths) -> dict[int, Walk | EngineError]:
        out: dict[int, Walk | EngineError] = {}
        root = 0
        for i, share in enumerate(batch.choosing):
            path = paths.rows[i, : int(paths.count[i])]
            if share.work.plan.draws:
                out[share.work.handle] = walk_on_host(share.work, share.base, partial(_row, logits, root))
            elif not paths.finite[i]:
                text = "the model's logits are not finite; the model or its weights are damaged"
                out[share.work.handle] = EngineError(text)
            else:
                accepted, last = tuple((path[1:] - root - 1).tolist()), int(paths.token[i])
                chosen = [*(share.work.plan.tokens[n] for n in accepted), last]
                asked = share.work.logprobs
                logprobs = () if asked is None else top_logprobs(logits[path.to(logits.device)], chosen, asked)
                out[share.work.handle] = Walk(accepted, last, logprobs)
            root += 1 + len(share.depths)
        return out

    def _move(self, batch: Batch, walks: dict[int, Walk | EngineError]) -> None:
        """Accepted nodes' keys and values from where they were computed to the slots of their positions."""
        pairs: list[tuple[int, int]] = []
        for share in batch.choosing:
            walk = walks[share.work.handle]
            if isinstance(walk, Walk) and walk.accepted:
                slots = prefix_slots(share.pages, share.length + share.rows)[
                    share.base :
                ]  # of nodes; the first are final
                pairs += [(int(slots[n]), int(slots[k])) for k, n in enumerate(walk.accepted) if n != k]
        if pairs:
            source, destination = torch.tensor(pairs, device=self.decoder.device).T
            self.cache.move(source, destination)

    @contextmanager
    def _timed(self, batch: Batch) -> Iterator[None]:
        began = self._clock()
        yield
        self.timing.run += self._clock() - began
        self.timing.rows += batch.layout.rows


def _row(logits: Tensor, root: int, node: int) -> Logits:
    """Logits [V] after a node of the session whose root row is `root`, on the host."""
    row: Logits = logits[root + 1 + node].float().cpu().numpy()
    return row


def out_of_memory(e: Exception) -> bool:
    """Whether torch, on any device, ran out of memory. On the CPU it says so in a plain RuntimeError."""
    return isinstance(e, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(e, RuntimeError) and ("out of memory" in str(e) or "can't allocate memory" in str(e))
    )
