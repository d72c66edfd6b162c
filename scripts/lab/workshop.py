"""The pair made ready for the lab: files, vocabulary, recorded cases, one memo a case, a predictor that has learned on others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from paceline.cloud.engine import Engine
from paceline.cloud.engines.llamacpp import LlamaEngine
from paceline.edge.draft import Candidates
from paceline.edge.predictor import Predictor
from paceline.edge.text import Text
from paceline.protocol.ngrams import Ngrams
from paceline.protocol.request import GenerationRequest
from paceline.protocol.sampling import Sampling
from paceline.protocol.vocabulary import Vocabulary
from paceline.scripts.lab.cases import Case, Prompt, Recordings
from paceline.scripts.lab.edges import EdgeCost, edge_named, fitted, measured
from paceline.scripts.lab.experiment import Bench, Setting, answer
from paceline.scripts.lab.forest import Forest
from paceline.scripts.lab.memo import Memo, begin, digest_of
from paceline.scripts.models import Pair
from paceline.scripts.pairs import ngrams_of

CONTEXT = 4096
WIDTH = 40  # nodes of a step of the real target


@dataclass
class Workshop:
    """`cache` is the lab's own folder. Nothing is loaded before it is needed."""

    pair: Pair
    text: Text
    cache: Path
    threads: int | None = None
    _forests: list[Forest] = field(default_factory=list)
    _native: list[EdgeCost] = field(default_factory=list)
    _live: list[LlamaEngine] = field(default_factory=list)

    @property
    def vocabulary(self) -> Vocabulary:
        return self.text.vocabulary

    def cases(
        self, prompts: Sequence[Prompt], sampling: Sampling, max_tokens: int, done: Callable[[], None] = lambda: None
    ) -> list[Case]:
        """The target's own text for every prompt; recorded where it is not in the cache."""
        recordings = Recordings(self.cache / "recordings", self.pair.target, self._target)
        cases = []
        for p in prompts:
            tokens = tuple(self.text.prompt([{"role": "user", "content": p.text}]))
            text = recordings.text(GenerationRequest(tokens, sampling, max_tokens, self.text.end_tokens))
            cases.append(Case(p.name, p.category, tokens, sampling, text))
            done()
        return cases

    def memo(self, case: Case) -> Memo:
        stat = self.pair.draft.stat()
        folder = self.cache / "memo" / f"{self.pair.draft.stem}.{stat.st_size:x}.{stat.st_mtime_ns:x}"
        return Memo(folder / f"{begin(case).hex()}.npz", case, self._forest)

    def taught(self, cases: Sequence[Case]) -> Predictor:
        """A predictor that has seen what the target did on the whole text of `cases`."""
        predictor = Predictor()
        for case in cases:
            memo = self.memo(case)
            for found, token in outcomes(memo, case):
                predictor.learn(found, token, seeded=not case.sampling.greedy)
            memo.save()
        return predictor

    def taught_by_draws(self, cases: Sequence[Case], setting: Setting) -> Predictor:
        """One that has seen how often draws are taken, in answers to `cases`."""
        predictor = Predictor()
        for case in cases:
            answer(self.bench(case, predictor), case, replace(setting, learns=True))
        return predictor

    def bench(self, case: Case, predictor: Predictor) -> Bench:
        return Bench(self.vocabulary, self.memo(case), predictor, self.live, self.ngrams)

    @cached_property
    def ngrams(self) -> Ngrams | None:
        """What the target is known to write."""
        return ngrams_of(self.vocabulary.fingerprint, self.pair.draft)

    def live(self) -> Engine:
        """The target itself; where it takes part in virtual time its steps cost what they are said to."""
        if not self._live:
            engine = LlamaEngine(self.pair.target, context=CONTEXT, slots=1, max_width=WIDTH, threads=self.threads)
            engine.step_cost = [(1, 1e-9), (2, 1e-9)]
            self._live.append(engine)
        return self._live[0]

    def edge(self, name: str) -> EdgeCost:
        """A preset, two milliseconds, or `native`: what the draft's steps cost here, measured once. Raises PacelineError."""
        if name != "native":
            return edge_named(name)
        if not self._native:
            from paceline.edge.drafts.llamacpp import LlamaDraft

            draft = LlamaDraft(self.pair.draft, self.vocabulary, cells=512, threads=1)
            self._native.append(fitted(measured(draft)))
            draft.shut()
        return self._native[0]

    def close(self) -> None:
        for forest in self._forests:
            forest.close()
        for engine in self._live:
            engine.shut()

    def _forest(self) -> Forest:
        if not self._forests:
            self._forests.append(Forest(self.pair.draft, self.vocabulary, threads=self.threads))
        return self._forests[0]

    def _target(self) -> Engine:
        return LlamaEngine(self.pair.target, context=CONTEXT, slots=1, threads=self.threads)


def outcomes(memo: Memo, case: Case) -> list[tuple[Candidates, int]]:
    """(candidates, the target's token) along the text of a case."""
    paths = [(digest_of(case, case.text[:i]), case.text[:i]) for i in range(len(case.text))]
    return list(zip(memo.of(paths), case.text, strict=True))
