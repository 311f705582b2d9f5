"""Engines that are not where the configuration says."""

from urllib.parse import urlsplit

import pytest
from fakes import proxying
from findings import engine_findings, graded

from proxy.cli.check.network import find_engine, is_tokentape
from proxy.config.settings import Settings
from proxy.server.listener import simulating
from proxy.simulator.options import Options


@pytest.fixture
async def engine():
    """An engine that lists models, at its root and by plain HTTP."""
    async with simulating("127.0.0.1:0", Options()) as url:
        yield url


@pytest.mark.parametrize("wrong", ["{}/v1/chat/completions", "{}/api/", "https://{host}", "https://{host}/v1/x"])
async def test_the_address_that_was_meant_is_found(engine, wrong):
    """A trailing path, https where plain HTTP is spoken, and both: the finding says what to write."""
    url = wrong.format(engine, host=urlsplit(engine).netloc)
    (fault,) = graded(await engine_findings(url))["fault"]

    assert f"use {engine}, where an engine responds" in fault


async def test_v1_at_the_end_is_taken_off(engine):
    """Base URLs of clients end in it: that is no mistake here."""
    assert [] == graded(await engine_findings(f"{engine}/v1/"))["fault"]


async def test_a_dead_port_is_told_once():
    """Nobody listens, whatever is tried: the sentence says so, and asks what to look at."""
    assert await find_engine("http://127.0.0.1:9") is None
    (fault,) = graded(await engine_findings("http://127.0.0.1:9"))["fault"]

    assert 1 == fault.count("is unreachable")
    assert "check that it is running" in fault


async def test_a_proxy_of_our_own_is_no_engine(engine, store):
    """One that runs, and the one that this very configuration would start."""
    async with proxying(engine, store) as served:
        (fault,) = graded(await engine_findings(served.url))["fault"]

    assert "this is a TokenTape proxy" in fault
    assert await is_tokentape("http://localhost:8400", Settings())
    assert not await is_tokentape(engine, Settings())
