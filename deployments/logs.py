"""Log lines as JSON objects, one a line, for whoever collects them.

Owns the format. The application's own loggers get it; Ray's and Serve's are theirs.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import IO

OUR_LOGGERS = ("deployments", "engine", "autoscale")


class JsonFormatter(logging.Formatter):
    """`time`, `level`, `logger`, `message`, then the record's `figures` if it has any, and `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "figures", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def log_as_json(stream: IO[str] | None = None) -> logging.Handler:
    """Write this process's lines of ours as JSON.

    Args:
        stream: default: stderr.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    for name in OUR_LOGGERS:
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.propagate = False
        logger.setLevel(logging.INFO)
    return handler
