# Generated from tokentape/events.py by `python -m docs.generate`; edit events.py instead.
"""Changes of rollouts, followed across lost connections."""

from collections.abc import Callable, Generator
from contextlib import closing
from time import sleep
from typing import Final

from tokentape.transport import ClientError, parse_line
from tokentape.types import Change
from tokentape.waits import MAX_WAIT_S, Wait

CONNECTED: Final = b": following"  # the first line of the response
DATA: Final = b"data: "
MIN_DELAY_S: Final = 0.25  # between two connections; it doubles until a change is received
MAX_DELAY_S: Final = 10.0


def follow_events(connect: Callable[[], Generator[bytes, None, None]]) -> Generator[Change | None, None, None]:
    """Yield None after each connection, and the changes that follow; `connect` opens one and yields its lines.

    Raises ClientError if the first connection fails, for an error that no repetition passes, such as 401, or after two hours
    without a connection.
    """
    delay_s = MIN_DELAY_S
    was_connected = False
    outage: Wait | None = None
    while True:
        try:
            with closing(connect()) as lines:
                for line in lines:
                    if line == CONNECTED:
                        was_connected, outage = True, None
                        yield None
                    elif line.startswith(DATA):
                        delay_s = MIN_DELAY_S
                        yield parse_line(line.removeprefix(DATA))
        except ClientError as error:
            outage = Wait(MAX_WAIT_S) if outage is None else outage
            if not was_connected or not error.may_pass or not outage.left_s:
                raise
            if not outage.until_log_s:
                outage.log(f"a connection: {error}")
        sleep(delay_s)
        delay_s = min(2 * delay_s, MAX_DELAY_S)
