"""Queries as OpenAPI describes them; rewards within the range of float32; headers of responses; IDs and URLs of rollouts."""

from math import inf, nan
from urllib.parse import quote

import pytest
from aiohttp.test_utils import make_mocked_request
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, ValidationError
from yarl import URL

from proxy.api.control import CONTROL_ROUTES
from proxy.api.control.schemas import ListSteps
from proxy.api.model.routes import named_rollout, parse_path
from proxy.api.requests import (
    LARGEST,
    Signal,
    Signals,
    downstream,
    id_from_path,
    model_host,
    parameters,
    path_prefix,
    query_from,
    read_object,
)
from proxy.errors import BadRequest, UnprocessableRequest
from proxy.rollouts.rollout import checked_id


class Body(BaseModel):
    model_config = ConfigDict(strict=True)

    single: Signal | None = None
    many: Signals = {}


@given(st.floats() | st.integers(-(2**63), 2**64 - 1))
def test_a_signal_is_a_number_within_the_range_of_float32(value):
    """Other numbers are rejected at any depth."""
    fits = -LARGEST <= value <= LARGEST
    for body in ({"single": value}, {"many": {"s": value}}, {"many": {"s": [0, {"t": [value]}]}}):
        if fits:
            assert Body.model_validate(body)
        else:
            with pytest.raises(ValidationError):
                Body.model_validate(body)


@pytest.mark.parametrize("number", ["NaN", "-NaN", "Infinity", "-Infinity", "1e400", "-1e400"])
def test_nan_and_infinity_are_422(number):
    """They are found at any position in the body."""
    with pytest.raises(UnprocessableRequest):
        read_object(f'{{"é": "NaN", "reward": [0, {number}]}}'.encode())


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"a": Nan}', b"\xff"])
def test_a_malformed_body_is_400(text):
    with pytest.raises(BadRequest) as refused:
        read_object(text)

    assert refused.value.status == 400


@pytest.mark.parametrize("value", [nan, inf, 1e39, "1", None, True])
def test_nan_strings_and_booleans_are_not_signals(value):
    with pytest.raises(ValidationError):
        Body.model_validate({"single": value if value is not None else []})


QUERIES = [
    pytest.param(route.query, name, schema, id=f"{route.path}?{name}")
    for route in CONTROL_ROUTES
    if route.query is not None
    for name, schema in parameters(route.query).items()
]


@pytest.mark.parametrize(("model", "name", "schema"), QUERIES)
def test_a_query_takes_the_values_that_openapi_describes_and_no_others(model, name, schema):
    """Texts are stripped only where their length is limited."""
    valid, invalid = values_of(schema)
    required = {"q": "x"} if name != "q" and "q" in parameters(model) else {}
    for text in valid:
        assert getattr(
            query_from(make_mocked_request("GET", str(URL("/").with_query({**required, name: text}))), model), name
        )
    for text in invalid:
        with pytest.raises(BadRequest) as refused:
            query_from(make_mocked_request("GET", str(URL("/").with_query({**required, name: text}))), model)
        assert refused.value.param == name


def values_of(schema):
    """Return texts that are truthy values of this schema, and texts that are none."""
    kind = schema.get("type")
    if "enum" in schema:
        return schema["enum"], ["", "other", schema["enum"][0].upper()]
    if kind == "boolean":
        return ["true"], ["", "1", "True"]
    if kind == "integer":
        most = schema.get("maximum", 10**12 - 1)
        wrong = [schema["minimum"] - 1, most + 1, "", "x", "1.0", "+1", "1_0", " 1", "9" * 5000]
        return [str(schema["minimum"] or 1), str(most)], list(map(str, wrong))
    if kind == "number":
        most = schema.get("maximum", 1e300)
        return [str(most)], ["", "x", "nan", "inf", *([str(most + 1), "-1"] if "maximum" in schema else [])]
    if "minLength" in schema:
        return ["a", " a ", "a" * schema["maxLength"]], ["", " ", "a" * (schema["maxLength"] + 1)]
    return ["a", " "], []


def test_an_unknown_parameter_is_refused_with_the_known_ones():
    request = make_mocked_request("GET", "/?limits=1")
    with pytest.raises(BadRequest, match=r"^Unknown query parameter 'limits'; use one of after, limit\.$"):
        query_from(request, ListSteps)

    assert query_from(request, ListSteps, takes_others=True) == ListSteps()


@pytest.mark.parametrize("value", ["a\rb", "a\nb", "a\x00b", "\x1b[31m", "a\x7f"])
def test_header_values_with_control_characters_are_dropped(value):
    """The rest of the response is forwarded; tabs and non-ASCII characters are allowed."""
    forwarded = downstream([("X-Odd", value), ("X-Tab", "a\tb"), ("X-Other", "ü\udcff")])

    assert forwarded == [("X-Tab", "a\tb"), ("X-Other", "ü\udcff")]


@pytest.mark.parametrize("connection", ["keep-alive", "close, X-Private", "X-Private"])
def test_the_engines_headers_are_forwarded(connection):
    """Without framing headers, and without headers in which the engine poses as TokenTape."""
    private = [("X-Private", "1")] if connection == "keep-alive" else []
    forwarded = downstream(
        [
            ("Content-Type", "x"),
            ("Content-Length", "3"),
            ("X-Private", "1"),
            ("Connection", connection),
            ("Retry-After", "7"),
            ("X-Rollout-Id", "forged"),
            ("X-Step-Id", "forged"),
        ]
    )

    assert forwarded == [("Content-Type", "x"), *private, ("Retry-After", "7")]


def test_headers_about_the_engines_own_address_are_not_forwarded():
    """Addresses, cookies and credentials, and permissions of web pages; what describes the response is."""
    dropped = [
        "Location", "Content-Location", "Refresh", "Link", "Alt-Svc", "Via", "X-Served-By", "X-Accel-Redirect", "Set-Cookie",
        "WWW-Authenticate", "Access-Control-Allow-Origin", "access-control-allow-credentials", "Access-Control-Expose-Headers",
        "Timing-Allow-Origin", "Content-Security-Policy", "Content-Security-Policy-Report-Only", "Cross-Origin-Resource-Policy",
        "Strict-Transport-Security", "Clear-Site-Data", "Service-Worker-Allowed", "Report-To", "NEL", "SourceMap",
    ]  # fmt: skip
    kept = {
        "Content-Type": "text/event-stream", "Server": "uvicorn", "Retry-After": "7", "X-Should-Retry": "false",
        "X-Request-Id": "1", "request-id": "2", "X-RateLimit-Remaining": "3", "X-Accel-Buffering": "no",
    }  # fmt: skip

    assert list(kept.items()) == downstream((dict.fromkeys(dropped, "x") | kept).items())


IDS = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=256)


@given(IDS)
def test_every_rollout_id_can_be_percent_encoded_in_a_path(name):
    """It is decoded unchanged, with either prefix."""
    segment = quote(name, safe="")

    assert name == checked_id(name)
    for prefix, endpoint in [("rollouts", "/v1/models"), ("sessions", "/v1/x"), ("rollouts", "/inference/v1/generate")]:
        assert parse_path(f"/{prefix}/{segment}{endpoint}") == (endpoint, segment)
    assert name == id_from_path(segment)


@pytest.mark.parametrize("name", ["", "x" * 257, "a\nb", "\x00", "\x7f", "\x85", "\ud800"])
def test_an_invalid_rollout_id_is_rejected(name):
    """IDs have 1 to 256 characters, without control characters and surrogates."""
    with pytest.raises(BadRequest, match="rollout id"):
        checked_id(name)


@pytest.mark.parametrize("segment", ["%FF", "\udcff", "%ED%A0%80"])
def test_a_path_that_is_not_utf8_is_rejected(segment):
    with pytest.raises(BadRequest, match="UTF-8"):
        id_from_path(segment)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/rollouts", "/rollouts/r1", "/other/r1/v1", "/"])
def test_a_path_without_a_prefix_has_no_rollout_id(path):
    assert parse_path(path) == (path, None)


def test_the_rollout_id_is_taken_from_the_first_source_that_has_one():
    """The order is path, header, minted key, API key, body, the body's metadata."""
    sources = {
        "path": "p", "header": "h", "minted": "m", "key": "rollout:k",
        "body": {"rollout_id": "b", "metadata": {"rollout_id": "d"}},
    }  # fmt: skip
    found = []
    for absent, without in (("path", None), ("header", None), ("minted", None), ("key", "sk-x"), ("body", {})):
        found.append(named_rollout(**sources))
        sources[absent] = without

    assert found == ["p", "h", "m", "k", "b"]
    assert named_rollout(**sources | {"body": {"metadata": {"rollout_id": "d"}}}) == "d"
    assert named_rollout(**sources) is None


def test_a_rollout_id_in_a_body_has_to_be_a_string():
    """Metadata that is not an object is left to the engine."""
    nothing = {"path": None, "header": None, "minted": None, "key": None}
    with pytest.raises(BadRequest, match="not int"):
        named_rollout(**nothing, body={"rollout_id": 7})

    assert named_rollout(**nothing, body={"metadata": "x"}) is None
    assert named_rollout(**nothing, body={"rollout_id": None, "metadata": {"rollout_id": None}}) is None


@pytest.mark.parametrize(
    ("listen", "requested", "host_and_port"),
    [
        ("10.0.0.5:8400", "http://localhost:9000/rollouts", "10.0.0.5:8400"),
        ("0.0.0.0:8400", "http://trainer.example:9000/rollouts", "trainer.example:8400"),
        (":8400", "http://[::1]:9000/rollouts", "[::1]:8400"),
        ("[::]:8400", "http://trainer.example/rollouts", "trainer.example:8400"),
    ],
)
def test_with_a_wildcard_address_the_url_has_the_host_of_the_request(listen, requested, host_and_port):
    """Clients cannot connect to 0.0.0.0."""
    host = model_host(listen, URL(requested))

    assert host_and_port == host


@pytest.mark.parametrize(("rollout_id", "prefix"), [("r 1/a", "/rollouts/r%201%2Fa"), ("..", ""), (".", "")])
def test_a_url_names_the_rollout_unless_clients_would_resolve_its_id_as_a_folder(rollout_id, prefix):
    """For the rollout `..` only the API key names it."""
    assert prefix == path_prefix(rollout_id)
