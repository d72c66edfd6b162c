"""What `serve run paceline.scripts.ray_app:app` and the config files of Ray Serve build: verifiers, from names and numbers.

    serve run paceline.scripts.ray_app:app model=smollm2 slots=32 min_replicas=2

The arguments are the settings of `paceline cloud` by their names, and the fields of `paceline.cloud.ray_serve.Scale`.
"""

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from paceline.cloud.ray_serve import Loaded, Scale, verifiers
from paceline.cloud.serve import load_engine
from paceline.cloud.settings import PREFIX, Settings, effective
from paceline.protocol.errors import PacelineError
from pydantic import TypeAdapter, ValidationError


def app(args: Mapping[str, Any]) -> Any:
    """An application of Ray Serve. Raises PacelineError naming the argument that is wrong."""
    settings, scale = arguments(args)
    return verifiers(settings, load, scale)


def arguments(args: Mapping[str, Any]) -> tuple[Settings, Scale]:
    """What the arguments say. Raises PacelineError naming the one that is wrong."""
    names = {field.name for field in fields(Scale)}
    try:
        scale = TypeAdapter(Scale).validate_python({k: v for k, v in args.items() if k in names})
    except ValidationError as e:
        wrong = e.errors()[0]
        raise PacelineError(f"{wrong['loc'][0]}: {wrong['msg'][0].lower()}{wrong['msg'][1:]}") from None
    given = {k: v for k, v in args.items() if k not in names}
    unknown = sorted(given.keys() - Settings.model_fields.keys())
    if unknown:
        raise PacelineError(f"there is no setting {unknown[0]!r}")
    config = os.environ.get(f"{PREFIX}CONFIG")
    return effective(given, Path(config) if config else None)[0], scale


def load(settings: Settings) -> Loaded:
    """On the replica's machine: fetch the models where they are not there, and load them."""
    from paceline.cloud.logs import set_up
    from paceline.scripts.models import cache_folder, resolve
    from paceline.scripts.pairs import backups_of, vocabulary_of

    set_up(settings.log_format, settings.log_level)
    toy = settings.engine == "toy"
    path = None if toy else resolve(settings.model, cache_folder(), lambda done, total: None)
    engine = load_engine(settings, path)
    return Loaded(engine, vocabulary_of(path) if path is not None else None, backups_of(settings, engine))
