"""The rights of each key, on every route of /openapi.json."""

import re

import pytest

from proxy.api.api_keys import mint
from proxy.api.openapi import ROUTES

CONTROL, AGENT = "control-key", "agent-key"
CHAT = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "seed": 1, "max_tokens": 4}
MODEL = re.compile(
    r".*(/v1/(chat/)?completions(/render)?|/v1/models(/\{model\})?|/v1/rollout/completed|/generate|/v1/messages(/count_tokens)?"
    r"|/v1/responses(/\{response_id\}(/input_items)?)?|/v1beta/models(/\{model\}(:\w+)?)?)"
)
GEMINI = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}
BODIES = {
    **{f"/v1beta/models/{{model}}:{method}": GEMINI for method in ("generateContent", "streamGenerateContent")},
    "/v1/messages": CHAT,
    "/v1/responses": {"model": "policy", "input": "hi"},
    "/v1/chat/completions": CHAT,
}
OPEN = {"/health", "/healthz", "/ready", "/readyz"}


def is_health(path):
    return path in OPEN or path.endswith("/health")


def is_page(path):
    """Return whether this is a file of the page: they contain no data, and the page itself has a form for the key."""
    return path.startswith("/ui") or path == "/"


CONTROLLING = [
    (r.method, r.path) for r in ROUTES if not MODEL.fullmatch(r.path) and not is_health(r.path) and not is_page(r.path)
]
NAMING = [(r.method, r.path) for r in ROUTES if MODEL.fullmatch(r.path) and "{rollout_id}" in r.path]
PLAIN = [
    (r.method, r.path)
    for r in ROUTES
    if MODEL.fullmatch(r.path)
    and r.method == "post"
    and "{" not in r.path.replace("{model}", "")
    and not r.path.endswith(("/count_tokens", ":countTokens"))
]
COUNTING = [("post", "/v1/messages/count_tokens"), ("post", "/v1beta/models/{model}:countTokens")]  # of no rollout
STORED = [(r.method, r.path) for r in ROUTES if r.path.startswith("/v1/responses/{")]
OF_SESSIONS = [(r.method, r.path) for r in ROUTES if r.path.startswith("/{uuid}/v1/")]


def filled(path, name):
    """Return the path with every parameter replaced."""
    return re.sub(r"\{\w+\}", name, path)


@pytest.fixture
async def victims(guarded):
    """Rollouts r1 and r2, each with its own key, r2 with a step; a group g2; a session."""
    keys = {}
    for name in ("r1", "r2"):
        keys[name] = (await guarded.call("POST", "/rollouts", CONTROL, json={"rollout_id": name})).json["api_key"]
    assert (await guarded.call("POST", "/rollouts/r2/v1/chat/completions", keys["r2"], json=CHAT)).status == 200
    assert (await guarded.call("POST", "/groups", CONTROL, json={"group_id": "g2", "size": 2})).status == 201
    keys["session"] = (await guarded.call("POST", "/sessions/create", CONTROL, json={})).json["uuid"]
    return keys


async def state(guarded):
    """Return everything that does not belong to r1, from the control API."""
    bodies = [
        (await guarded.call("GET", path, CONTROL)).json for path in ("/rollouts", "/groups", "/policy", "/sessions")
    ]
    bodies[0]["rollouts"] = sorted((r for r in bodies[0]["rollouts"] if r["rollout_id"] != "r1"), key=str)
    return bodies


def test_every_route_of_the_description_is_tried():
    """Each belongs to one API: none is missing from the lists below."""
    listed = {*CONTROLLING, *NAMING, *PLAIN, *OF_SESSIONS, *COUNTING, *STORED}
    rest = {(r.method, r.path) for r in ROUTES} - listed

    assert {path for _, path in rest if not is_health(path) and not is_page(path)} == {
        "/v1/models",
        "/v1/models/{model}",
        "/v1beta/models",
        "/v1beta/models/{model}",
    }
    assert len(CONTROLLING) > 25
    assert len(NAMING) > 6


async def test_agent_keys_have_no_access_to_the_control_api(guarded, victims):
    """An agent key, a minted one (also of that rollout), a forged one, a name, none: 401 or 403, and nothing changes."""
    before = await state(guarded)
    keys = (AGENT, victims["r1"], victims["r2"], mint("r2", "birth", b"secret"), "rollout:r2", "control-keY", "x", None)
    passed = []
    for method, path in CONTROLLING:
        for name in ("r1", "r2", "g2", victims["session"]):
            for key in keys:
                response = await guarded.call(method, filled(path, name), key, data=b"{}")
                if response.status not in (401, 403):
                    passed.append((method, path, name, key, response.status))

    assert passed == []
    assert before == await state(guarded)


@pytest.mark.parametrize("target", [
    "//rollouts", "/rollouts/", "/rollouts//", "/./rollouts", "/x/../rollouts", "/%72ollouts", "/ROLLOUTS", "/rollouts%2F",
    "/rollouts;x", "/rollouts%00", "/rollouts%0d%0a", "/rollouts/r2/", "/rollouts/r2/x/../export", "/rollouts/r2/%65xport",
    "/sessions/../rollouts/r2/export", "/r1/v1/../../rollouts", "/rollouts/r1/v1/../../r2/steps", "/rollouts/r1/../r2/steps",
    "/rollouts/r2%2Fexport", "/rollouts/r2/steps/../steps", "/groups/g2/%2e%2e/%2e%2e/rollouts", "http://x/rollouts", "*",
])  # fmt: skip
async def test_no_form_of_a_path_bypasses_the_key(guarded, victims, target):
    """Dots, double slashes, encoded letters, absolute URLs: never the response of a control route."""
    for method in ("GET", "HEAD", "OPTIONS", "TRACE"):
        for key in (victims["r1"], AGENT):
            sent = f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: Bearer {key}\r\n\r\n"
            response = await guarded.raw(sent.encode())

            assert re.match(rb"HTTP/1\.[01] (400|401|403|404|405)", response), response[:200]


@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH", "DELETE", "HEAD", "POST"])
async def test_a_method_override_header_is_ignored(guarded, victims, method):
    """X-HTTP-Method-Override and similar headers have no effect."""
    before = await state(guarded)
    for name in ("X-HTTP-Method-Override", "X-Method-Override", "X-Original-URL", "X-Rewrite-URL"):
        value = method if "Method" in name else "/rollouts/r2"
        response = await guarded.call("POST", "/v1/completions", victims["r1"], headers={name: value}, data=b"{}")
        assert response.status in (400, 422)

    assert before == await state(guarded)


@pytest.mark.parametrize(("method", "path"), NAMING)
async def test_a_minted_key_has_no_access_to_another_rollout_by_path(guarded, victims, method, path):
    """403, and the other rollout is unchanged."""
    before = await state(guarded)
    body = {**CHAT, "prompt": "hi", "rollout_id": "r1", "status": "COMPLETED"}
    response = await guarded.call(method, filled(path, "r2"), victims["r1"], json=body)

    assert response.status == 403
    assert before == await state(guarded)


@pytest.mark.parametrize(("method", "path"), PLAIN)
async def test_a_minted_key_has_no_access_to_another_rollout_by_header_or_body(guarded, victims, method, path):
    """A header that names another rollout is 403; the key takes precedence over a name in the body."""
    before = (await guarded.call("GET", "/rollouts/r2", CONTROL)).json
    names = {"rollout_id": "r2", "metadata": {"rollout_id": "r2"}}
    prompt = {"prompt_token_ids": [3, 4]} if path == "/generate" else [3, 4]
    body = names | BODIES.get(path, {"prompt": prompt, "max_tokens": 2})
    named = await guarded.call(method, path, victims["r1"], headers={"X-Rollout-Id": "r2"}, json=body)
    within = await guarded.call(method, path, victims["r1"], headers={"X-Rollout-Group": "g2"}, json=body)

    if path.endswith("completed"):
        assert {named.status, within.status} <= {400, 403, 422}
    else:
        assert named.status == 403
        assert within.headers.get("X-Rollout-Id", "r1") == "r1"
    assert before["counts"] == (await guarded.call("GET", "/rollouts/r2", CONTROL)).json["counts"]
    assert (await guarded.call("GET", "/rollouts/r1", CONTROL)).json["group_id"] is None


@pytest.mark.parametrize(("method", "path"), STORED)
async def test_a_minted_key_has_no_access_to_a_response_of_another_rollout(guarded, victims, method, path):
    """403 by the response's ID, which contains its rollout's; the response remains."""
    response = await guarded.call("POST", "/rollouts/r2/v1/responses", victims["r2"], json=BODIES["/v1/responses"])
    foreign = await guarded.call(method, filled(path, response.json["id"]), victims["r1"])
    own = await guarded.call("GET", filled("/v1/responses/{response_id}", response.json["id"]), victims["r2"])

    assert (foreign.status, own.status) == (403, 200)


@pytest.mark.parametrize(("method", "path"), OF_SESSIONS)
async def test_a_minted_key_has_no_access_to_another_session(guarded, victims, method, path):
    """Atropos sessions are rollouts: 403 for another one's key."""
    response = await guarded.call(method, filled(path, victims["session"]), victims["r1"], json=CHAT)

    assert response.status == 403


async def test_a_result_is_accepted_only_for_the_keys_own_rollout(guarded, victims):
    """Osmosis' callback with the ID of another rollout is 403, wherever the ID is."""
    body = {"rollout_id": "r2", "status": "COMPLETED", "final_messages": [], "reward": 1.0}
    for path in ("/v1/rollout/completed", "/rollouts/r2/v1/rollout/completed", "/sessions/r2/v1/rollout/completed"):
        assert (await guarded.call("POST", path, victims["r1"], json=body)).status == 403

    assert (await guarded.call("GET", "/rollouts/r2", CONTROL)).json["status"] == "open"


async def test_a_key_expires_with_its_rollout(guarded, victims):
    """Deleted and opened again under the same ID, a rollout has a new key; the old one is 401."""
    await guarded.call("DELETE", "/rollouts/r1", CONTROL)
    again = await guarded.call("POST", "/rollouts", CONTROL, json={"rollout_id": "r1"})
    old = await guarded.call("POST", "/v1/chat/completions", victims["r1"], json=CHAT)

    assert again.status == 201
    assert old.status == 401
