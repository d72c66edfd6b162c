"""The vocabulary of a Hugging Face folder as one file, for a device that has no target.

A JSON object with `tokenizer` (the whole of tokenizer.json), `chat_template`, `bos` and `end_tokens` (ids), gathered
from the files beside it. The GGUF counterpart is `vocab`. Knows nothing about tokenising.
"""

import json
from pathlib import Path
from typing import Any

from paceline.quant.landing import landing
from paceline.quant.vocab import CorruptModelError


def write_folder_vocabulary(folder: Path, dst: Path) -> None:
    """Write the vocabulary of the model in `folder` to `dst`, whole or not at all.

    Raises `CorruptModelError` when the folder has no readable tokenizer.json, and `DiskError`.
    """
    tokenizer = _json(folder / "tokenizer.json")
    if not tokenizer:
        raise CorruptModelError(f"{folder} has no readable tokenizer.json: fetch the model's tokenizer files too.")
    settings = _json(folder / "tokenizer_config.json")
    ids = {t["content"]: t["id"] for t in tokenizer.get("added_tokens", [])}
    ids |= tokenizer.get("model", {}).get("vocab", {}) if isinstance(tokenizer["model"].get("vocab"), dict) else {}
    ends = _ids(_json(folder / "generation_config.json").get("eos_token_id")) + _ids(
        _json(folder / "config.json").get("eos_token_id")
    )
    named = _content(settings.get("eos_token"))
    if named in ids:
        ends.append(ids[named])
    bundle = {
        "name": folder.name,
        "tokenizer": tokenizer,
        "chat_template": _template(folder, settings),
        "bos": ids.get(_content(settings.get("bos_token")), -1),
        "end_tokens": sorted(set(ends)),
    }
    with landing(dst) as part:
        part.write_text(json.dumps(bundle, ensure_ascii=False))


def _template(folder: Path, settings: dict[str, Any]) -> str | None:
    own = folder / "chat_template.jinja"
    if own.is_file():
        return own.read_text()
    found = settings.get("chat_template")
    if isinstance(found, list):  # several, by name
        found = next((t["template"] for t in found if t.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def _content(token: Any) -> str:
    """A token's spelling: the settings give it bare, or in an object with its flags."""
    return token.get("content", "") if isinstance(token, dict) else token or ""


def _ids(value: Any) -> list[int]:
    return [value] if isinstance(value, int) else list(value or [])


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
