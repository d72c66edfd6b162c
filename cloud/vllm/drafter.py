"""The drafter inside vLLM's worker: hands out, in the middle of a step, what the door has put into the mailbox.

vLLM loads it by name (`--speculative-config '{"method": "custom_class", "model": "paceline.cloud.vllm.drafter.Drafter", ...}'`),
gives it no request's name, and waits for its answer; so texts are told apart by their tokens, and nothing here ever waits.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.cloud.vllm.mailbox import VARIABLE, Mailbox
from paceline.protocol.errors import EngineError


class Drafter:
    """`config` is vLLM's VllmConfig. Raises EngineError where no mailbox is named."""

    def __init__(self, config: Any) -> None:
        if not (path := os.environ.get(VARIABLE)):
            raise EngineError(f"{VARIABLE} names no mailbox; start vLLM with paceline cloud --engine vllm")
        self._mailbox = Mailbox(Path(path))
        self._width = int(config.speculative_config.num_speculative_tokens)

    def load_model(self, target: Any) -> None:
        """vLLM's CPU worker asks every drafter for this; there are no weights here."""

    def propose(
        self, sampled_token_ids: Sequence[Sequence[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, **_: object
    ) -> list[list[int]]:
        """Chains for the rows of a batch. `num_tokens_no_spec` [B], `token_ids_cpu` [B, longest] int32.

        A row that sampled nothing is still reading its prompt.
        """
        rows = (
            token_ids_cpu[i, : num_tokens_no_spec[i]] if len(sampled) else None
            for i, sampled in enumerate(sampled_token_ids)
        )
        return self._mailbox.chains(rows, self._width)
