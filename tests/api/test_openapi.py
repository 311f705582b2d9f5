"""/openapi.json, which describes every route."""

from proxy.api.compat.atropos_generate import GENERATE
from proxy.api.compat.atropos_sessions import SESSION_CALL_ROUTES, SESSION_ROUTES
from proxy.api.compat.osmosis import COMPLETED
from proxy.api.openapi import CONTROLLING, ROUTES, describe
from proxy.protocols.dialects import DIALECTS, TRANSLATORS


async def test_exactly_the_served_routes_are_described(proxy):
    """The model API's dialects and callbacks are described with every prefix."""
    control = {(route.method, route.path) for route in (*CONTROLLING, *SESSION_ROUTES, *SESSION_CALL_ROUTES)}
    described = {(route.method, route.path) for route in ROUTES}
    calls = {
        ("post", prefix + path)
        for path in (*DIALECTS, *TRANSLATORS, GENERATE, COMPLETED, "/v1/messages/count_tokens")
        for prefix in ("", "/rollouts/{rollout_id}", "/sessions/{rollout_id}")
    }
    stored = {
        (method, f"{prefix}/v1/responses/{{response_id}}{rest}")
        for method, rest in (("get", ""), ("delete", ""), ("get", "/input_items"))
        for prefix in ("", "/rollouts/{rollout_id}", "/sessions/{rollout_id}")
    }
    models = {("get", "/v1/models"), ("get", "/v1/models/{model}")}

    gemini = {
        (method, f"{prefix}/v1beta/models{rest}")
        for method, rest in (
            ("get", ""),
            ("get", "/{model}"),
            *(("post", f"/{{model}}:{name}") for name in ("generateContent", "streamGenerateContent", "countTokens")),
        )
        for prefix in ("", "/rollouts/{rollout_id}", "/sessions/{rollout_id}")
    }
    health = {("get", f"/{name}/{{rollout_id}}/health") for name in ("rollouts", "sessions")}

    assert described == control | calls | stored | models | gemini | health
    assert describe() == (await proxy.get("/openapi.json")).json


async def test_the_schemas_of_bodies_come_from_the_pydantic_models(proxy):
    document = (await proxy.get("/openapi.json")).json
    schemas = document["components"]["schemas"]
    schema = document["paths"]["/rollouts"]["post"]["requestBody"]["content"]["application/json"]["schema"]

    assert schema["$ref"].rpartition("/")[2] == "OpenRollout"
    assert {"rollout_id", "group_id", "sampling", "limits"} <= schemas["OpenRollout"]["properties"].keys()
