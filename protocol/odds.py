"""How often something comes true that was expected: learnt from outcomes, of which old ones fade."""


class Odds:
    """True outcomes over expected ones, lately."""

    __slots__ = ("_expected", "_memory", "_true")

    def __init__(self, before: float, weight: float, memory: float) -> None:
        """`before`: the ratio to reckon with before any outcome, which counts as much as `weight` expected ones.

        memory: what is left of earlier outcomes after the next.
        """
        self._true, self._expected, self._memory = before * weight, weight, memory

    @property
    def ratio(self) -> float:
        return self._true / self._expected

    def learn(self, true: float, expected: float = 1.0) -> None:
        """So many came true of so many that were expected."""
        self._true = self._memory * self._true + true
        self._expected = self._memory * self._expected + expected
