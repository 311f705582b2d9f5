"""Log lines as text and as JSON."""

import logging
import sys

import orjson

from proxy.telemetry.logs import LOG, JsonLines, TextLines, is_sampled, set_up

FIELDS = {"rollout_id": "a b\nc", "status": 200, "seconds": 0.123456, "none": None}


def record(**named) -> logging.LogRecord:
    log_record = logging.LogRecord("tokentape", logging.INFO, "f", 1, "call", (), None)
    log_record.fields = FIELDS
    for name, value in named.items():
        setattr(log_record, name, value)
    return log_record


def test_a_text_line_is_one_line():
    """Values with line breaks or spaces are quoted."""
    line = TextLines().format(record())

    assert "\n" not in line
    assert line.endswith('call rollout_id="a b\\nc" status=200 seconds=0.1235')


def test_a_json_line_is_one_object_with_level_message_and_fields():
    line = orjson.loads(JsonLines().format(record()))

    assert FIELDS.items() <= line.items()
    assert (line["level"], line["message"]) == ("info", "call")


def test_an_exception_is_in_text_and_json_lines():
    try:
        raise ValueError("oops")
    except ValueError:
        failed = record(exc_info=sys.exc_info())

    assert "oops" in TextLines().format(failed)
    assert "oops" in orjson.loads(JsonLines().format(failed))["exception"]


def test_set_up_logs_to_standard_error_at_the_configured_level(capsys):
    before = LOG.handlers, LOG.level, LOG.propagate
    try:
        set_up("warning", "json")
        LOG.info("quiet")
        LOG.warning("loud")
    finally:
        LOG.handlers, LOG.level, LOG.propagate = before[0], before[1], before[2]

    assert [orjson.loads(line)["message"] for line in capsys.readouterr().err.splitlines()] == ["loud"]


def test_a_sample_has_about_its_share_of_names_and_each_smaller_sample():
    """A share of 1 has all names and one of 0 none, also names that are not valid UTF-8."""
    names = [f"rollout-{number}" for number in range(10_000)] + ["\ud800"]
    tenth, half = ({name for name in names if is_sampled(name, share)} for share in (0.1, 0.5))

    assert 900 < len(tenth) < 1100
    assert 4800 < len(half) < 5200
    assert tenth < half
    assert all(is_sampled(name, 1) and not is_sampled(name, 0) for name in names)
