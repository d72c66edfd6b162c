"""A recorded target: verifies against what the real one wrote, at no compute; the scheduler's floor paces it.

Exact by construction: the target's text is a pure function of (prompt, parameters), so a walk along the recording is the
walk the target would take. Every figure made with it says so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.cloud.engine import Work
from paceline.protocol.cloud_session import Walk
from paceline.protocol.errors import EngineError
from paceline.protocol.sampling import Sampling
from paceline.protocol.vocabulary import Vocabulary

Key = tuple[tuple[int, ...], Sampling]  # prompt and parameters


@dataclass
class Recorded:
    """A sequence of which `tokens` were played; the first `prompt` of them are the prompt."""

    prompt: tuple[int, ...]
    tokens: list[int]


class ReplayEngine:
    """`recordings` maps (prompt, parameters) to the target's text."""

    def __init__(
        self,
        name: str,
        vocabulary: Vocabulary,
        recordings: Mapping[Key, Sequence[int]],
        *,
        context: int = 8192,
        max_width: int = 64,
    ) -> None:
        self.name, self.vocabulary, self.context = f"{name} (recorded)", vocabulary, context
        self.max_width = self.free_width = max_width
        self.chunk = 1 << 20
        self.step_cost = [(1, 1e-9), (2, 1e-9)]
        self._recordings = recordings
        self._prompts = {prompt for prompt, _ in recordings}
        self._sequences: dict[int, Recorded] = {}
        self._opens = 0

    def open(self, tokens: Sequence[int]) -> int:
        known = [p for p in self._prompts if tuple(tokens[: len(p)]) == p]
        if not known:
            raise EngineError("nothing was recorded for this prompt")
        self._opens += 1
        self._sequences[self._opens] = Recorded(max(known, key=len), [])
        return self._opens

    def length(self, handle: int) -> int:
        return len(self._sequences[handle].tokens)

    def verify(self, batch: Sequence[Work]) -> list[Walk | EngineError | None]:
        return [self._verify(work) for work in batch]

    def close(self, handle: int) -> None:
        del self._sequences[handle]

    def _verify(self, work: Work) -> Walk | EngineError | None:
        sequence = self._sequences[work.handle]
        sequence.tokens.extend(work.tokens)
        if not work.choose:
            return None
        text = self._recordings.get((sequence.prompt, work.sampling))
        if text is None:
            return EngineError("nothing was recorded for this prompt with these parameters")
        at = len(sequence.tokens) - len(sequence.prompt)
        if list(text[:at]) != sequence.tokens[len(sequence.prompt) :]:
            return EngineError("the text so far is not the recorded one")
        return self._walk(sequence, work, text, at)

    def _walk(self, sequence: Recorded, work: Work, text: Sequence[int], at: int) -> Walk | EngineError:
        children = {
            (parent, token): i
            for i, (parent, token) in reversed(list(enumerate(zip(work.plan.parents, work.plan.tokens, strict=True))))
        }
        accepted: list[int] = []
        here = -1
        while at < len(text) and (below := children.get((here, text[at]))) is not None:
            accepted.append(below)
            here, at = below, at + 1
        if at >= len(text):
            return EngineError("the recording ends here")
        sequence.tokens.extend(work.plan.tokens[i] for i in accepted)
        return Walk(tuple(accepted), text[at])
