"""The errors of making drafts, all `PacelineError`: the sentence says what to do."""

from paceline.protocol.errors import PacelineError


class WeightsError(PacelineError):
    """A weight file cannot be used: truncated, hostile, or of a kind not read here."""


class DraftError(PacelineError):
    """A draft folder is incomplete, damaged, or belongs to another target."""


class RecipeError(PacelineError):
    """A draft was asked for that this target cannot give."""
