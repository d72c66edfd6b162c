"""Questions to the toy target, the only right answer to each, and the tally of what came back."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from paceline.cloud.engines.toy import ToyEngine
from paceline.protocol.request import GenerationRequest
from paceline.protocol.sampling import History, Sampling, choose


class Question(GenerationRequest, frozen=True):
    @classmethod
    def drawn(cls, random: Random, vocabulary_size: int, longest: int = 60) -> "Question":
        """Any question: greedy, seeded, filtered or penalised; one in three ends at a stop token."""
        sampling = random.choice(
            [
                Sampling(),
                Sampling(seed=random.randrange(2**32), temperature=0.8),
                Sampling(seed=random.randrange(2**32), temperature=1.2, top_p=0.9, repetition_penalty=1.2),
            ]
        )
        stops = (random.randrange(vocabulary_size),) if random.random() < 1 / 3 else ()
        prompt = tuple(random.randrange(vocabulary_size) for _ in range(random.randrange(1, 9)))
        return cls(prompt, sampling, random.randrange(1, longest + 1), stops)

    def answer(self, target: ToyEngine) -> list[int]:
        """What the target writes alone, token by token."""
        text: list[int] = []
        while len(text) < self.max_tokens and not (text and text[-1] in self.stop_ids):
            sequence = [*self.prompt, *text]
            history = History(self.prompt, text) if self.sampling.penalised else None
            text.append(choose(target.logits(sequence), self.sampling, len(sequence), history))
        return text


@dataclass
class Tally:
    """What became of the answers asked for; a stopped one must be the beginning of the right one."""

    answers: int = 0
    tokens: int = 0
    stopped: int = 0
    altered: int = 0
    lost: int = 0
    crippled: int = 0  # agents that stopped drafting for good
    reasons: list[str] = field(default_factory=list)

    def count(self, got: Sequence[int], right: Sequence[int], *, stopped: bool = False) -> None:
        self.answers, self.tokens, self.stopped = self.answers + 1, self.tokens + len(got), self.stopped + stopped
        if list(got) != list(right[: len(got)] if stopped else right):
            self.altered += 1
            self.reasons.append(f"altered after {len(got)} of {len(right)} tokens")

    def lose(self, reason: str) -> None:
        self.answers, self.lost = self.answers + 1, self.lost + 1
        self.reasons.append(f"lost: {reason}")

    @property
    def whole(self) -> bool:
        return not self.altered and not self.lost and not self.crippled
