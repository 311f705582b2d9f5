"""The log: one line a call, in words for people or in JSON for machines.

Holds the formatters and the set-up of logging. What is logged is names, counts, statuses and durations: never the content
of a message, never a key. `fields` of a record come by `extra={"fields": {...}}`.
"""

import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

import orjson
from aiohttp.http_exceptions import HttpProcessingError

LOG = logging.getLogger("tokentape")
WIRE_LOG = logging.getLogger("tokentape.wire")  # aiohttp's server speaks to this one


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Time, level, message and the fields."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


class TextLines(logging.Formatter):
    """`12:00:00 info  call  rollout_id=r1 status=200 …`."""

    def format(self, record: logging.LogRecord) -> str:
        """Time, level, message and the fields, in one line unless there is an exception."""
        time = datetime.fromtimestamp(record.created, UTC).strftime("%H:%M:%S")
        words = " ".join(f"{name}={_word(value)}" for name, value in _fields(record).items() if value is not None)
        line = f"{time} {record.levelname.lower():7} {record.getMessage()} {words}".rstrip()
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


FORMATS: dict[str, type[logging.Formatter]] = {"text": TextLines, "json": JsonLines}


def tell_no_bytes(record: logging.LogRecord) -> bool:
    """Make a request that nobody could read one line without its bytes: what is malformed may hold a key.

    aiohttp logs a traceback for each that quotes the line; anybody could fill a disk with it.
    """
    if record.exc_info and isinstance(record.exc_info[1], HttpProcessingError):
        record.msg, record.args = "Malformed request rejected", ()
        record.exc_info = record.exc_text = None
        record.levelno, record.levelname = logging.INFO, "INFO"
    return True


WIRE_LOG.addFilter(tell_no_bytes)


def set_up(level: str, form: Literal["text", "json"]) -> None:
    """Send the log to standard error."""
    stream = logging.StreamHandler(sys.stderr)
    stream.setFormatter(FORMATS[form]())
    LOG.handlers = [stream]
    LOG.setLevel(level.upper())
    LOG.propagate = False


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = getattr(record, "fields", {})
    return fields


def _word(value: Any) -> str:
    """A value as one word: what has blanks or control characters is quoted, so that a line stays a line."""
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return text if text.isprintable() and " " not in text else orjson.dumps(text).decode()
