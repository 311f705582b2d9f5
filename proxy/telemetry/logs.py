"""The formatters and the setup of the log, as text or as JSON.

Names, counts, statuses and durations are logged; contents of messages and keys are not. Pass fields of a record as
`extra={"fields": {...}}`.
"""

import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal
from zlib import crc32

import orjson

LOG = logging.getLogger("tokentape")
WIRE_LOG = logging.getLogger("tokentape.wire")  # used by aiohttp's server


class JsonLines(logging.Formatter):
    """Formats each record as a line with a JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a line with the time, the level, the message and the fields."""
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
    """Formats each record as `12:00:00 info  call  rollout_id=r1 status=200 …`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a line with the time, the level, the message and the fields, followed by the traceback of an exception."""
        time = datetime.fromtimestamp(record.created, UTC).strftime("%H:%M:%S")
        words = " ".join(f"{name}={_word(value)}" for name, value in _fields(record).items() if value is not None)
        line = f"{time} {record.levelname.lower():7} {record.getMessage()} {words}".rstrip()
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


FORMATS: dict[str, type[logging.Formatter]] = {"text": TextLines, "json": JsonLines}


def drop_request_bytes(record: logging.LogRecord) -> bool:
    """Replace aiohttp's log record of a malformed request, which quotes its bytes and a traceback, by one line.

    The bytes may contain a key, and clients could fill the disk with tracebacks.
    """
    if not record.exc_info:
        return True
    from aiohttp.http_exceptions import HttpProcessingError  # noqa: PLC0415 - commands without HTTP start faster

    if isinstance(record.exc_info[1], HttpProcessingError):
        record.msg, record.args = "Malformed request rejected", ()
        record.exc_info = record.exc_text = None
        record.levelno, record.levelname = logging.INFO, "INFO"
    return True


WIRE_LOG.addFilter(drop_request_bytes)


def is_sampled(name: str, share: float) -> bool:
    """Return whether a name belongs to this share of all names: the same in every process."""
    return crc32(name.encode("utf-8", "surrogatepass")) < share * 2**32


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
    """Return a value as one word, quoted if it contains spaces or control characters."""
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return text if text.isprintable() and " " not in text else orjson.dumps(text).decode()
