"""TLS on both sides, of the listeners and of calls to engines. The store's: tests/storage/redis/test_connections.py."""

import ssl
import warnings

import aiohttp
import pytest
from aiohttp import web
from tests.support.fakes import proxying, settings_for
from tests.support.listening import listening
from tests.support.recorded import load

from proxy.cli.control import ControlAddress
from proxy.cli.export import ExportRequest, download
from proxy.server.listener import running

WHOLE = load("chat_ids_lp")
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def secure_engine(certificate):
    """An engine that requires TLS, and the requests that it received."""
    requests = []

    async def respond(request):
        requests.append(request.path)
        if request.method == "GET":
            return web.json_response({"version": "0.32.0"})
        return web.Response(body=WHOLE.response, content_type="application/json")

    async with listening(respond, certificate) as url:
        yield url, requests


async def test_both_apis_listen_with_tls(store, engine, certificate):
    """With listen_tls, a client that trusts the certificate is served on both ports; plain HTTP is rejected."""
    engine.plays(WHOLE)
    listen_tls = {"cert_file": certificate[0], "key_file": certificate[1]}
    async with (
        proxying(engine.url, store, listen_tls=listen_tls, control={"listen": "127.0.0.1:0"}) as served,
        aiohttp.ClientSession() as http,
    ):
        trusting = ssl.create_default_context(cafile=certificate[0])
        async with http.post(served.url + "/v1/chat/completions", json=CHAT, ssl=trusting) as called:
            pass
        async with http.post(served.control_url + "/rollouts", json={}, ssl=trusting) as opened:
            rollout = await opened.json()
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await http.get(served.url + "/health")
        with pytest.raises(aiohttp.ClientError):
            await http.get(served.url.replace("https", "http") + "/health")

    assert (served.url.startswith("https://"), called.status, opened.status) == (True, 200, 201)
    assert rollout["base_url"].startswith("https://")


async def test_old_versions_of_tls_are_rejected(store, engine, certificate):
    """The minimum is TLS 1.2."""
    listen_tls = {"cert_file": certificate[0], "key_file": certificate[1]}
    async with proxying(engine.url, store, listen_tls=listen_tls) as served, aiohttp.ClientSession() as http:
        old = ssl.create_default_context(cafile=certificate[0])
        old.minimum_version = ssl.TLSVersion.TLSv1_2
        async with http.get(served.url + "/health", ssl=old) as spoken:
            pass
        older = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        older.set_ciphers("DEFAULT:@SECLEVEL=0")
        older.load_verify_locations(certificate[0])
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            older.minimum_version, older.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
        with pytest.raises(aiohttp.ClientError):
            await http.get(served.url + "/health", ssl=older)

    assert spoken.status == 200


async def test_invalid_certificate_files_are_reported(store, engine, tmp_path, certificate):
    """Before the server listens."""
    for cert, key in ((certificate[1], certificate[0]), (tmp_path / "none", certificate[1])):
        with pytest.raises(ValueError, match="listen_tls"):
            async with proxying(engine.url, store, listen_tls={"cert_file": cert, "key_file": key}):
                pass


async def test_an_engine_with_tls_is_called_if_its_ca_is_trusted(store, certificate, secure_engine):
    """With engines.ca_file; otherwise its certificate is rejected, with 503, and nothing is sent."""
    url, requests = secure_engine
    async with aiohttp.ClientSession() as http:
        async with (
            proxying(url, store) as served,
            http.post(served.url + "/v1/chat/completions", json=CHAT) as refused,
        ):
            assert refused.status == 503
        assert requests == []
        async with (
            proxying(url, store, engines={"ca_file": certificate[0]}) as served,
            http.post(served.url + "/v1/chat/completions", json=CHAT) as called,
        ):
            assert called.status == 200

    assert "/v1/chat/completions" in requests


async def test_an_export_with_an_own_store_needs_no_certificate(tmp_path, engine, certificate):
    """The proxy of the command itself is local: the certificate may have another name than 127.0.0.1."""
    listen_tls = {"cert_file": certificate[0], "key_file": certificate[1]}
    settings = settings_for(engine.url, listen_tls=listen_tls, store={"url": f"embedded:{tmp_path / 'store'}"})
    async with running(settings):
        pass
    out = tmp_path / "rows"
    export = ExportRequest("sequences", (), None, "exact", "ndjson")
    await download(ControlAddress(None, settings, None), export, out)

    assert out.read_bytes() == b""
