"""The log: one line a call."""

import logging
import sys

import orjson

from proxy.telemetry.logs import LOG, JsonLines, TextLines, set_up

FIELDS = {"rollout_id": "a b\nc", "status": 200, "seconds": 0.123456, "none": None}


def record(**named) -> logging.LogRecord:
    made = logging.LogRecord("tokentape", logging.INFO, "f", 1, "call", (), None)
    made.fields = FIELDS
    for name, value in named.items():
        setattr(made, name, value)
    return made


def test_a_line_for_people_is_one_line():
    """Hostile names are quoted."""
    line = TextLines().format(record())

    assert "\n" not in line
    assert line.endswith('call rollout_id="a b\\nc" status=200 seconds=0.1235')


def test_a_line_for_machines_is_one_object():
    """With time, level, message and every field."""
    line = orjson.loads(JsonLines().format(record()))

    assert FIELDS.items() <= line.items()
    assert ("info", "call") == (line["level"], line["message"])


def test_an_exception_is_told():
    """In both."""
    try:
        raise ValueError("oops")
    except ValueError:
        failed = record(exc_info=sys.exc_info())

    assert "oops" in TextLines().format(failed)
    assert "oops" in orjson.loads(JsonLines().format(failed))["exception"]


def test_set_up_sends_lines_to_standard_error(capsys):
    """Once, and at the level that was set."""
    before = LOG.handlers, LOG.level, LOG.propagate
    try:
        set_up("warning", "json")
        LOG.info("quiet")
        LOG.warning("loud")
    finally:
        LOG.handlers, LOG.level, LOG.propagate = before[0], before[1], before[2]

    assert ["loud"] == [orjson.loads(line)["message"] for line in capsys.readouterr().err.splitlines()]
