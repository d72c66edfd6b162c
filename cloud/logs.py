"""Log lines for machines: one JSON object each, with session and connection ids, and never text of prompts or answers.

Nothing that edges write gets in by design: messages are ours, and fields beyond them only those that `figures` holds.
"""

import json
import logging
import sys
from datetime import UTC, datetime


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        figures = getattr(record, "figures", None)
        if isinstance(figures, dict):
            line |= figures
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        figures = getattr(record, "figures", None)
        more = "".join(f" {k}={v}" for k, v in figures.items()) if isinstance(figures, dict) else ""
        return super().format(record) + more


def set_up(kind: str, level: str) -> None:
    """Log to standard error from now on. `kind` is json or text."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if kind == "json" else TextLines("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # It logs headers, and a whole traceback for everybody who comes and speaks no websocket: strangers would fill disks.
    logging.getLogger("websockets").setLevel(logging.CRITICAL)
