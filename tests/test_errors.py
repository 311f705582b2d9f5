"""The text of an error."""

import socket
import ssl

import aiohttp
import pytest

from proxy.errors import failure_text

KEY = aiohttp.client_reqrep.ConnectionKey("engine", 8000, False, True, None, None, None)
REFUSED = OSError(111, "Connect call failed ('127.0.0.1', 8000)")
WRONG_VERSION = ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:1006)")
UNKNOWN = ssl.SSLCertVerificationError(
    1, "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed certificate (_ssl.c:1006)"
)
SEVERAL = OSError(
    "Multiple exceptions: [Errno 111] Connect call failed ('::1', 9), [Errno 113] Connect call failed ('::2', 9)"
)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (aiohttp.ClientConnectorError(KEY, REFUSED), "cannot connect to engine:8000: Connection refused"),
        (
            aiohttp.ClientConnectorError(KEY, SEVERAL),
            "cannot connect to engine:8000: Connection refused, No route to host",
        ),
        (
            aiohttp.ClientConnectorDNSError(KEY, socket.gaierror(-2, "Name or service not known")),
            "cannot connect to engine:8000: Name or service not known",
        ),
        (aiohttp.ClientConnectorSSLError(KEY, WRONG_VERSION), "cannot connect to engine:8000: wrong version number"),
        (
            aiohttp.ClientConnectorCertificateError(KEY, UNKNOWN),
            "cannot connect to engine:8000: certificate verify failed: self-signed certificate",
        ),
        (FileNotFoundError(2, "No such file or directory", "a.yaml"), "No such file or directory: a.yaml"),
        (OSError("the proxy's own sentence"), "the proxy's own sentence"),
        (ValueError(), "ValueError"),
        (aiohttp.ServerDisconnectedError(), "Server disconnected"),
    ],
)
def test_the_text_has_the_address_and_the_reason_and_no_terms_of_libraries(error, text):
    assert text == failure_text(error)


async def test_a_real_refused_connection_names_its_address():
    async with aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.ClientConnectorError) as refused:
            await http.get("http://127.0.0.1:9")

    assert failure_text(refused.value) == "cannot connect to 127.0.0.1:9: Connection refused"
