"""Requests that load and unload LoRA adapters at vLLM endpoints."""

from collections.abc import Mapping
from contextlib import closing
from typing import Any, Final

import orjson

from proxy.errors import EngineError
from proxy.upstream.client import Upstream, body_of
from proxy.upstream.endpoint import Endpoint

_LOAD: Final = "/v1/load_lora_adapter"
_UNLOAD: Final = "/v1/unload_lora_adapter"
_HEADERS: Final = (("Content-Type", "application/json"),)
_MAX_MESSAGE: Final = 500
_MAX_BYTES: Final = 2**16


async def load_adapter(upstream: Upstream, endpoint: Endpoint, name: str, path: str) -> None:
    """Load an adapter, in place of the one that has its name. Raises EngineError."""
    body = {"lora_name": name, "lora_path": path, "load_inplace": True}
    status, message = await _post(upstream, endpoint, _LOAD, body)
    if status == 400 and "already been loaded" in message:  # a vLLM without load_inplace, which ignores the field
        await unload_adapter(upstream, endpoint, name)
        status, message = await _post(upstream, endpoint, _LOAD, body)
    if status != 200:
        raise EngineError(f"Engine {endpoint.label} did not load the adapter: {message}")


async def unload_adapter(upstream: Upstream, endpoint: Endpoint, name: str) -> None:
    """Unload an adapter; one that is not loaded is no error. Raises EngineError."""
    status, message = await _post(upstream, endpoint, _UNLOAD, {"lora_name": name})
    if status not in (200, 404):
        raise EngineError(f"Engine {endpoint.label} did not unload the adapter: {message}")


async def _post(upstream: Upstream, endpoint: Endpoint, path: str, body: Mapping[str, Any]) -> tuple[int, str]:
    """Return the status and the message of the response; the models of the endpoint are listed again. Raises EngineError."""
    endpoint.models.forget()
    response = await upstream.send(
        endpoint, "POST", path, headers=_HEADERS, body=orjson.dumps(body), new_connection=True, is_auxiliary=True
    )
    with closing(response):
        message = _message(bytes(await body_of(response, _MAX_BYTES)))
    endpoint.models.forget()  # a call may have listed them meanwhile
    return response.status, f"{path} returned {response.status}: {message}"


def _message(body: bytes) -> str:
    """Return the message of vLLM's error, with the reason if the route does not exist."""
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:_MAX_MESSAGE].decode("utf-8", "replace")
    error = answer.get("error", answer) if isinstance(answer, dict) else None
    if error == {"detail": "Not Found"}:
        return "start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
    message = error.get("message") if isinstance(error, dict) else None
    return str(message if message is not None else answer)[:_MAX_MESSAGE]
