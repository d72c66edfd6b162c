"""How a verifier runs: settings from flags, environment and a file, in this order, checked, and shown without secrets.

A setting `drain_timeout` is the flag --drain-timeout, the variable PACELINE_CLOUD_DRAIN_TIMEOUT and the key drain_timeout of a
TOML file. What a flag says wins over the environment, that over the file, that over the default.
"""

import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from paceline.cloud.limits import Bounds
from paceline.protocol.errors import PacelineError
from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

PREFIX = "PACELINE_CLOUD_"
READY = "ready at "  # how the line begins by which a verifier says that it serves
Seconds = Annotated[float, Field(ge=0, le=86400)]
Some = Annotated[int, Field(ge=1)]


class Settings(BaseSettings):
    """Times in seconds; `width` None: as many nodes as the engine takes."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True, protected_namespaces=())

    model: str = "smollm2"
    engine: str = "llamacpp"
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8765
    context: Annotated[int, Field(ge=16)] = 2048
    slots: Some = 8
    queue: Annotated[int, Field(ge=0)] = 256  # sessions that wait for a slot
    connections: Some = 1024
    messages_a_second: Annotated[float, Field(gt=0)] = 2000.0  # of one key
    idle_timeout: Annotated[float, Field(gt=0)] = 120.0
    threads: Some | None = None
    gpu_layers: int = 0
    width: Annotated[int, Field(ge=0)] | None = None
    verify_floor: Annotated[float, Field(ge=0, le=10)] = 0.0
    backup: Literal["none", "ngram", "draft", "both"] = "none"  # what drafts where an edge's tree holds too little
    backup_draft: str | None = None  # the model of that draft; None: the one that goes with `model`
    ngrams: Path | None = (
        None  # what the target is known to write, for `backup`; None: as it ships, for a target that has one
    )
    session_ttl: Seconds = 60.0
    keep_order: bool = True
    device: str = "auto"  # of the torch engine: auto, cpu, cuda, cuda:N
    exact: bool = False  # of the torch engine: a row's bits never depend on its batch
    quant: str | None = None  # of the torch engine: nf4, int8, w4
    vllm_args: str = ""  # of the vllm engine: more of `vllm serve`'s own options, as a shell would write them
    drain_timeout: Seconds = 30.0
    keys: Path | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    tls_clients: Path | None = None
    log_format: Literal["text", "json"] = "text"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    otel: bool = False  # send spans, as the OTEL_* variables say

    @property
    def bounds(self) -> Bounds:
        return Bounds(self.connections, self.slots, self.queue, self.messages_a_second, self.idle_timeout)

    def changed(self, names: Iterable[str]) -> list[str]:
        """Those of these settings that are not what they are where nobody sets them."""
        return [name for name in names if getattr(self, name) != type(self).model_fields[name].default]

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings


def effective(flags: Mapping[str, Any], file: Path | None = None) -> tuple[Settings, dict[str, str]]:
    """The settings, and where each one comes from: flag, environment, file or default.

    Raises PacelineError naming the setting that is wrong, what it may be, and where it was set.
    """
    in_file = _read(file) if file is not None else {}
    in_environment = {
        name for name in Settings.model_fields if f"{PREFIX}{name}".upper() in {k.upper() for k in os.environ}
    }
    from_file = {name: value for name, value in in_file.items() if name not in in_environment}
    sources = {name: f"{file}" for name in from_file} | {name: f"{PREFIX}{name.upper()}" for name in in_environment}
    sources |= {name: f"--{name.replace('_', '-')}" for name in flags}
    try:
        settings = Settings(**{**from_file, **flags})
    except ValidationError as e:
        raise PacelineError("; ".join(_sentence(error, sources) for error in e.errors())) from None
    return settings, {name: sources.get(name, "default") for name in Settings.model_fields}


def _read(file: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError) as e:
        raise PacelineError(f"{file}: {getattr(e, 'strerror', None) or 'not a text file'}") from None
    except tomllib.TOMLDecodeError as e:
        raise PacelineError(f"{file}: not TOML ({e})") from None
    unknown = sorted(values.keys() - Settings.model_fields.keys())
    if unknown:
        raise PacelineError(f"{file}: there is no setting {unknown[0]!r}")
    return values


def _sentence(error: Any, sources: Mapping[str, str]) -> str:
    name = str(error["loc"][0]) if error["loc"] else "?"
    says = str(error["msg"])
    return f"{name} ({sources.get(name, name)}): {says[0].lower()}{says[1:]}"


def listing(settings: Settings, sources: Mapping[str, str]) -> str:
    """One line a setting, as TOML that could be the file, and where it comes from. Files of keys are named, not shown."""
    lines = []
    for name in Settings.model_fields:
        value = getattr(settings, name)
        shown = f"# {name} is not set" if value is None else f"{name} = {_toml(value)}"
        lines.append(f"{shown:<44} # {sources[name]}" if sources[name] != "default" else shown)
    return "\n".join(lines)


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
