"""Sentences for failed connections, without `[Errno 111]` and `ssl:default`, which are terms of Python's libraries."""

import os
import re
import ssl
from socket import gaierror
from typing import Final

import aiohttp

_ERRNO: Final = re.compile(r"\[Errno (\d+)\]")
_OF_OPENSSL: Final = re.compile(r"^\[.*?\] | \(_ssl\.c:\d+\)$")  # `[SSL: WRONG_VERSION_NUMBER] … (_ssl.c:1006)`


def failure_text(error: BaseException) -> str:
    """Return the message of an error, or its type if the message is empty."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect to {error.host}:{error.port}: {_reason(error.os_error)}"
    return _reason(error) if isinstance(error, OSError) else str(error) or type(error).__name__


def _reason(error: OSError) -> str:
    """Return the reason of an operating system error, such as `Connection refused`, with the file that it is about."""
    if isinstance(error, ssl.SSLError | gaierror) or not error.errno:
        if codes := dict.fromkeys(map(int, _ERRNO.findall(str(error)))):  # several addresses of a host failed
            return ", ".join(map(os.strerror, codes))
        return _OF_OPENSSL.sub("", error.strerror or str(error)) or type(error).__name__
    return os.strerror(error.errno) + ("" if error.filename is None else f": {error.filename}")
