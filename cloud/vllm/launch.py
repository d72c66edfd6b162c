"""How vLLM is started as a verifier: its arguments and its environment. Knows vLLM's flags, imports none of it."""

import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from paceline.cloud.keys import Keys
from paceline.cloud.server import tls_context
from paceline.cloud.settings import PREFIX, Settings
from paceline.cloud.vllm.mailbox import VARIABLE, Mailbox
from paceline.protocol.errors import PacelineError

WIDTH = 8  # tokens of a drafted chain where nobody says
DRAFTER = "paceline.cloud.vllm.drafter.Drafter"
_OURS = ("--speculative-config", "--speculative_config", "-sc", "--api-server-count", "--async-scheduling")
_FOREIGN = (
    "verify_floor",
    "exact",
    "quant",
    "gpu_layers",
    "threads",
    "device",
    "keep_order",
    "backup",
    "backup_draft",
    "ngrams",
    "otel",
)


def launch(settings: Settings, model: Path) -> NoReturn:
    """Become vLLM, with the drafter and the door inside. Raises PacelineError where that cannot work."""
    command = arguments(settings, model)
    if settings.keys is not None:
        Keys(settings.keys)  # read now: what is wrong with it should not come after minutes of loading
    if settings.tls_certificate is not None:
        tls_context(settings.tls_certificate, settings.tls_key, settings.tls_clients)
    if importlib.util.find_spec("vllm") is None:
        raise PacelineError("the vllm engine needs vLLM: pip install 'paceline[vllm]'")
    mailbox = Mailbox.create(settings.slots)
    os.execve(sys.executable, [sys.executable, *command], environment(settings, mailbox, os.environ))


def arguments(settings: Settings, model: Path) -> list[str]:
    """Python's arguments. Raises PacelineError for settings that vLLM cannot honour."""
    for name in settings.changed(_FOREIGN):
        flag = name.replace("_", "-")
        raise PacelineError(f"--{flag} is not for the vllm engine; vLLM's own options go into --vllm-args")
    if model.is_file():
        raise PacelineError(f"{model}: vLLM wants a folder in the Hugging Face layout, or hf:org/name")
    try:
        own = shlex.split(settings.vllm_args)
    except ValueError as e:
        raise PacelineError(f"--vllm-args: {e}") from None
    if taken := [a for a in own if a.partition("=")[0] in _OURS]:
        raise PacelineError(f"--vllm-args: {taken[0]} is set by the vllm engine itself")
    speculative = {"method": "custom_class", "model": DRAFTER, "num_speculative_tokens": _width(settings)}
    command = ["-m", "vllm.entrypoints.launchers.api_server.entry", "--model", str(model), "--host", settings.host]
    command += ["--port", str(settings.port), "--max-model-len", str(settings.context)]
    command += ["--max-num-seqs", str(settings.slots), "--speculative-config", json.dumps(speculative)]
    return [*command, *_tls(settings), *own]


def environment(settings: Settings, mailbox: Path, known: Mapping[str, str]) -> dict[str, str]:
    """`known`, and what door and drafter read: every setting under its variable, and where the mailbox is."""
    values = {name: getattr(settings, name) for name in Settings.model_fields}
    ours = {f"{PREFIX}{name}".upper(): str(value) for name, value in values.items() if value is not None}
    plugins = [p for p in known.get("VLLM_PLUGINS", "").split(",") if p]
    others = {k: v for k, v in known.items() if not k.upper().startswith(PREFIX)}
    return {**others, **ours, VARIABLE: str(mailbox), "VLLM_PLUGINS": ",".join([*plugins, "paceline"])}


def _width(settings: Settings) -> int:
    width = WIDTH if settings.width is None else settings.width
    if width < 1:
        raise PacelineError("--width 0 drafts nothing; without drafts plain vLLM is what to run")
    return width


def _tls(settings: Settings) -> list[str]:
    if settings.tls_certificate is None:
        return []
    out = ["--ssl-certfile", str(settings.tls_certificate)]
    out += ["--ssl-keyfile", str(settings.tls_key or settings.tls_certificate)]
    return out + (["--ssl-ca-certs", str(settings.tls_clients), "--ssl-cert-reqs", "2"] if settings.tls_clients else [])
