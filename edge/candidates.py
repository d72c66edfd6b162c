"""A draft's row as the edge takes it: its ranked candidates, so many of them."""

import numpy as np
import numpy.typing as npt
from paceline.edge.draft import Candidates, Choice
from paceline.edge.drawing import FAN_OUT as FAN_OUT
from paceline.edge.drawing import drawn
from paceline.protocol.candidates import likeliest


def candidates(logits: npt.NDArray[np.float32], position: int, choice: Choice, count: int = FAN_OUT) -> Candidates:
    """The `count` best continuations of a row with `logits` [V] (in the target's ids), chosen for absolute `position`."""
    if choice.drawing is not None:
        return drawn(logits, choice, choice.drawing)
    return Candidates(*likeliest(logits, choice.sampling, position, choice.history, count))
