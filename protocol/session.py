"""The two state machines of one generation; read `cloud_session` first: its opening lines are the exactness argument."""

from paceline.protocol.cloud_session import CloudSession, Limits, Plan, Walk
from paceline.protocol.edge_session import Committed, EdgeSession, Phase

__all__ = ["CloudSession", "Committed", "EdgeSession", "Limits", "Phase", "Plan", "Walk"]
