"""Osmosis' rollout servers (71b6d83, and f47b00f~1 for the asynchronous protocol): dispatch and results; flat calls.

A rollout is dispatched once, and only to configured servers. A server reports the result in its response or by a callback,
which finishes the rollout. If the server fails, the rollout is finished as failed, with the reason.

Flat calls are chat messages sent to `/v1/completions`. Their `response_mask` claims how many tokens were added since the
last call. The exact number follows from the ids: this prompt, minus the prompt and the sampled ids of the step before it.
"""

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from math import isfinite
from typing import Annotated, Any, Final, Literal, Self

import aiohttp
import orjson
from aiohttp import web
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat

from proxy.api.api_keys import mint
from proxy.api.auth import check_minted, may_report
from proxy.api.body import FIRST_FAULT, read_bytes
from proxy.api.context import CONTEXT, Context
from proxy.api.control.schemas import DispatchRollout
from proxy.api.model.call import ModelRequest
from proxy.api.model.routes import ModelRoute
from proxy.api.requests import (
    Signal,
    json_response,
    model_url,
    named,
    read_as,
    read_object,
    rollout_from,
    route,
    update_rollout,
    validated,
)
from proxy.config.sections import OsmosisSettings, RolloutServerSettings
from proxy.errors import BadRequest, Conflict, ProxyError, RequestTooLarge, UnprocessableRequest
from proxy.protocols.dialects.base import TranslationOptions
from proxy.protocols.json_texts import most_weight
from proxy.protocols.plan import CallAdapter, Outcome, Plan
from proxy.protocols.sampling import served_as
from proxy.rollouts.rollout import RESULT, Rollout, checked_id, read_rollout, write_fields
from proxy.telemetry.logs import LOG
from proxy.trajectory.arrays import Ids, Prompt
from proxy.trajectory.step import Step
from proxy.upstream.concurrency import LARGE_BYTES, BackgroundTasks, off_loop
from storage.errors import StorageError

COMPLETED: Final = "/v1/rollout/completed"
_STATUS: Final[Mapping[str, Literal["completed", "failed"]]] = {"COMPLETED": "completed", "ERROR": "failed"}
MAX_RESULT_BYTES: Final = 64_000  # of a result in a rollout's metadata
Name = Annotated[str, Field(min_length=1, max_length=256)]


class RolloutResult(BaseModel):
    """The result of a rollout as its server reports it: the response to `POST /rollout`, or the body of a callback."""

    model_config = ConfigDict(strict=True)

    rollout_id: Name
    status: Literal["COMPLETED", "ERROR"]
    final_messages: Annotated[list[dict[str, Any]], FIRST_FAULT] | None = None
    finish_reason: str | None = None
    error_message: str | None = None
    metrics: dict[str, Any] | None = None
    extra_fields: dict[str, Any] | None = None
    reward: Signal | None = None

    @cached_property
    def kept(self) -> dict[str, Any]:
        """The fields that are stored with the rollout: at most 64 kB of JSON. Raises RequestTooLarge.

        If they are larger, the messages are removed, which are in the steps as well, and `left_out` names them.
        """
        fields = self.model_dump(exclude_none=True, exclude={"rollout_id"})
        if len(orjson.dumps(fields)) > MAX_RESULT_BYTES and fields.pop("final_messages", None) is not None:
            fields["left_out"] = ["final_messages"]
        if len(orjson.dumps(fields)) > MAX_RESULT_BYTES:
            raise RequestTooLarge(
                f"The result without its messages is too large; the maximum is {MAX_RESULT_BYTES} bytes of JSON."
            )
        return fields


def read_result(body: Mapping[str, Any], rollout_id: str | None = None) -> RolloutResult:
    """Return the result in this body, of this rollout if it is known. Raises UnprocessableRequest or RequestTooLarge."""
    result = validated(RolloutResult, body)
    if rollout_id not in (None, result.rollout_id):
        raise UnprocessableRequest(f"rollout_id: the response is for another rollout, {result.rollout_id!r}.")
    _ = result.kept
    return result


async def report_result(call: ModelRequest) -> web.Response:
    """`POST /v1/rollout/completed`: a rollout server reports the result of a rollout. Raises BadRequest, Forbidden.

    Its clients retry: a repeated result changes nothing and is 200. A claim, which is a result from a caller without the
    permission to report one, is stored and has no effect. The rollout is created if it does not exist: it may have failed
    before its first call.
    """
    context, text = call.context, await read_bytes(call.request)
    result = await off_loop(len(text), LARGE_BYTES, lambda: read_result(read_object(text)))
    rollout_id = call.rollout_id or checked_id(result.rollout_id)
    check_minted(call.caller.minted, rollout_id)
    if result.rollout_id != rollout_id:
        raise BadRequest(
            f"rollout_id is {result.rollout_id!r} in the request body but {rollout_id!r} in the path.",
            param="rollout_id",
        )
    rollout = read_rollout(await context.store.open(rollout_id, {}, now_ms=context.clock.now_ms()))
    await (take_result if may_report(call.caller, context) else _keep_claim)(context, rollout, result)
    return json_response({"status": "ok"})


async def take_result(
    context: Context, rollout: Rollout, result: RolloutResult, *, status: Literal["aborted"] | None = None
) -> None:
    """Finish a rollout by the result that its server reported; `status` replaces the reported one.

    The result is stored in `metadata.osmosis`. An existing reward or status of the rollout, which the control API has set, is
    not changed.

    Raises:
        Conflict: a result with another status or reward was reported before.
        NotFound: the rollout was deleted.
        RequestTooLarge: the result has too many bytes.
    """
    decisive = {"status": result.status, "reward": result.reward}
    while rollout.result is None:
        was_finished = rollout.is_finished
        current = rollout.metadata.get(RESULT)
        claim = {"claim": current["claim"]} if isinstance(current, Mapping) and "claim" in current else {}
        metadata = {**rollout.metadata, RESULT: {**result.kept, **claim}}
        fields: dict[str, Any] = {"result": decisive, "metadata": metadata}
        if not was_finished:
            fields |= {"status": status or _STATUS[result.status], "finished_ms": context.clock.now_ms()}
            fields |= {} if rollout.reward is not None else {"reward": result.reward}
        is_set, rollout = await update_rollout(context, rollout, write_fields(fields), _deciding(rollout))
        if is_set:
            await context.finisher.after_finish(rollout, again=was_finished)
            return
    if rollout.result["status"] != result.status or result.reward not in (None, rollout.result["reward"]):
        raise Conflict(f"Rollout {rollout.rollout_id!r} already has another result.", param="rollout_id")
    await context.finisher.after_finish(rollout, again=True)


async def _keep_claim(context: Context, rollout: Rollout, claim: RolloutResult) -> None:
    """Store a claim in `metadata.osmosis.claim` unless a result is reported. It changes no reward and no status."""
    is_set = False
    while not is_set and rollout.result is None:
        current = rollout.metadata.get(RESULT, {})
        if not isinstance(current, Mapping) or current.get("claim") == claim.kept:
            return  # the trainer uses this name for something else, or the claim is repeated
        fields = write_fields({"metadata": {**rollout.metadata, RESULT: {**current, "claim": claim.kept}}})
        is_set, rollout = await update_rollout(context, rollout, fields, _deciding(rollout))


def _deciding(rollout: Rollout) -> dict[str, bytes | None]:
    return {name: rollout.origin.fields.get(name) for name in ("status", "reward", "metadata", "result")}


def ticket(server: str, protocol: str, digest: str, state: str) -> dict[str, Any]:
    """Return the fields of a dispatch that are stored with its rollout. `digest` identifies the request."""
    return {"server": server, "protocol": protocol, "asked": digest, "state": state}


MODEL_ROUTES: Final = {COMPLETED: ModelRoute("POST", report_result, takes_control_keys=True)}


_CONNECT_TIMEOUT_S: Final = 10
_MAX_QUOTED: Final = 500  # characters of an error response
_MAX_BYTES: Final = 2**23  # of a response, as of a body of the control API
_MAX_WEIGHT: Final = 2**27  # of memory for a parsed response


class ServerFault(Exception):
    """A rollout server failed. `category` is the protocol's error category."""

    def __init__(self, category: str, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.category = category
        self.message = message
        self.status = status


class RolloutServers:
    """The configured rollout servers. Create it in the event loop, and close it at shutdown."""

    def __init__(self, settings: OsmosisSettings) -> None:
        self._settings = settings
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=settings.timeout_s, sock_connect=_CONNECT_TIMEOUT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )
        self._tasks = BackgroundTasks()

    def __repr__(self) -> str:
        return f"<RolloutServers {', '.join(self._settings.servers) or 'none'}; {len(self._tasks)} requests>"

    def named(self, name: str) -> RolloutServerSettings:
        """Return the server with this name. Raises UnprocessableRequest, which lists the configured ones."""
        server = self._settings.servers.get(name)
        if server is None:
            known = ", ".join(sorted(self._settings.servers)) or "none"
            raise UnprocessableRequest(
                f"Unknown rollout server {name!r}; configured in osmosis.servers: {known}.",
                param="server",
            )
        return server

    async def post(self, name: str, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request to a server and return the JSON object of its response. Raises ServerFault."""
        server = self.named(name)
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if server.api_key is not None:
            headers["Authorization"] = f"Bearer {server.api_key.get_secret_value()}"
        # No redirects: they could lead past the allow-list.
        request = self._session.post(server.url + path, data=orjson.dumps(body), headers=headers, allow_redirects=False)
        try:
            async with request as response:
                text = await _received(name, response)
        except TimeoutError:
            raise ServerFault("timeout", f"Rollout server {name} timed out.") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ServerFault("network_error", f"Rollout server {name} is unreachable: {error}") from error
        if not 200 <= response.status < 300:
            quoted, status = text[:_MAX_QUOTED].decode("utf-8", "replace"), response.status
            category = "internal_error" if status >= 500 else "rate_limited" if status == 429 else "validation_error"
            raise ServerFault(category, f"Rollout server {name} returned status {status}: {quoted}", status)
        return await off_loop(len(text), LARGE_BYTES, _read, name, text)

    def start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Start a task that waits for a server; `close` cancels it."""
        return self._tasks.start(work)

    async def close(self) -> None:
        """Cancel all requests and close the session."""
        self._tasks.cancel()
        await self._tasks.wait()
        await self._session.close()


async def _received(name: str, response: aiohttp.ClientResponse) -> bytes:
    received = bytearray()
    async for read in response.content.iter_any():
        received += read
        if len(received) > _MAX_BYTES:
            raise ServerFault("internal_error", f"Rollout server {name} returned more than {_MAX_BYTES} bytes.")
    return bytes(received)


def _read(name: str, text: bytes) -> dict[str, Any]:
    try:
        body = orjson.loads(text) if most_weight(text) <= _MAX_WEIGHT else None
    except orjson.JSONDecodeError:
        body = None
    if not isinstance(body, dict):
        raise ServerFault("internal_error", f"Rollout server {name} did not return a JSON object.")
    return body


ROLLOUT_SERVERS = web.AppKey("rollout_servers", RolloutServers)
_NOT_FORWARDED: Final = {"server", "protocol", "wait"}  # fields of a dispatch that are not sent to the server


class InitAnswer(BaseModel):
    """The response to `POST /v1/rollout/init`: the tools of the policy."""

    rollout_id: Name
    tools: list[dict[str, Any]] = []


async def dispatch_rollout(request: web.Request) -> web.Response:
    """`POST /rollouts/{id}/dispatch`: 202 at once, or with `wait` 200 after the server's response.

    A repeated dispatch starts nothing and is 202; a different one is 409.
    """
    context, servers = request.app[CONTEXT], request.app[ROLLOUT_SERVERS]
    text = await read_bytes(request)
    dispatch = await off_loop(len(text), LARGE_BYTES, read_as, DispatchRollout, text)
    digest = (await off_loop(len(text), LARGE_BYTES, blake2b, text, digest_size=16)).hexdigest()
    servers.named(dispatch.server)
    rollout = await rollout_from(request)
    state = "starting" if dispatch.protocol == "async" else "started"
    fields = write_fields({"osmosis": ticket(dispatch.server, dispatch.protocol, digest, state)})
    is_new, rollout = await update_rollout(context, rollout, fields, {"osmosis": None, "status": None})
    if not is_new:
        if rollout.osmosis.get("asked") != digest:
            state = f"dispatched to {rollout.osmosis['server']}" if rollout.osmosis else rollout.status or ""
            raise Conflict(f"Rollout {rollout.rollout_id!r} is already {state}.", param="rollout_id")
        return _answer(rollout, status=202)
    body = _rollout_request(dispatch, rollout, context.settings.osmosis.server_url or model_url(request, context))
    key = mint(rollout.rollout_id, rollout.incarnation, context.secret, dispatch=digest)
    body["callback_api_key" if dispatch.protocol == "sync" else "api_key"] = key
    task = servers.start(_run(context, servers, rollout, dispatch, body))
    if not dispatch.wait:
        return _answer(rollout, status=202)
    await asyncio.shield(task)
    return _answer(await rollout_from(request), status=200)


def _rollout_request(dispatch: DispatchRollout, rollout: Rollout, server_url: str) -> dict[str, Any]:
    fields = dispatch.model_dump(exclude=_NOT_FORWARDED, exclude_none=True)
    params = fields.pop("sampling_params", None) or fields.pop("completion_params", None) or {}
    name = "sampling_params" if dispatch.protocol == "sync" else "completion_params"
    return {**fields, name: params, "rollout_id": rollout.rollout_id, "server_url": server_url}


async def _run(
    context: Context, servers: RolloutServers, rollout: Rollout, dispatch: DispatchRollout, body: dict[str, Any]
) -> None:
    """Run the rollout: in the synchronous protocol to its end, in the asynchronous one until the server has accepted it."""
    name = rollout.rollout_id
    try:
        if dispatch.protocol == "async":
            init = validated(InitAnswer, await servers.post(dispatch.server, "/v1/rollout/init", body))
            # From now on calls are accepted.
            begun = {"osmosis": {**rollout.osmosis, "state": "started"}, "tools": init.tools or None}
            await context.store.update_if(name, write_fields(begun), expect={}, now_ms=context.clock.now_ms())
            return
        result = read_result(await servers.post(dispatch.server, "/rollout", body), name)
    except StorageError as error:
        LOG.error("Tools of a rollout not stored: %s", error, extra={"fields": {"rollout_id": name}})
        return
    except ServerFault as fault:
        result = _failed(rollout, fault.category, fault.message, fault.status)
    except (UnprocessableRequest, RequestTooLarge) as fault:
        message = f"Rollout server {dispatch.server} returned an invalid response: {fault.message}"
        result = _failed(rollout, "validation_error", message)
    except asyncio.CancelledError:
        message = "The proxy shut down before the rollout server responded."
        await _settle(context, rollout, _failed(rollout, "aborted", message), is_aborted=True)
        raise
    await _settle(context, rollout, result)


async def _settle(context: Context, rollout: Rollout, result: RolloutResult, *, is_aborted: bool = False) -> None:
    """Finish the rollout; one that was finished or deleted meanwhile is not changed."""
    try:
        await take_result(context, rollout, result, status="aborted" if is_aborted else None)
    except (ProxyError, StorageError) as error:
        LOG.error(
            "Result of a rollout server not stored: %s", error, extra={"fields": {"rollout_id": rollout.rollout_id}}
        )


def _failed(rollout: Rollout, category: str, message: str, status: int | None = None) -> RolloutResult:
    fields = {"error_category": category, **({} if status is None else {"http_status": status})}
    return RolloutResult(rollout_id=rollout.rollout_id, status="ERROR", error_message=message, extra_fields=fields)


DISPATCH_ROUTES: Final = (
    route(
        "post", "/rollouts/{rollout_id:[^/]+}/dispatch", dispatch_rollout, "Dispatch a rollout to a rollout server.",
        202, 200, 400, 404, 409, 422, body=DispatchRollout,
    ),
)  # fmt: skip


def _answer(rollout: Rollout, *, status: int) -> web.Response:
    payload = {
        "rollout_id": rollout.rollout_id,
        "server": rollout.osmosis.get("server"),
        "protocol": rollout.osmosis.get("protocol"),
        **named(rollout, "status", "tools"),
        "result": rollout.metadata.get("osmosis"),
    }
    return json_response(payload, status=status)


_FLAT: Final = "/v1/completions"
_ANY_MODEL: Final = "default"  # the model name of its clients, which names none
_NO_LOGPROB: Final = -9999.0  # its schema allows no null; vLLM clamps logprobs to this value; the step is flagged


def _bits(mask: Any) -> Any:
    """Validate a mask as a whole, with one error for all of its items."""
    if mask is not None and not (isinstance(mask, list) and all(type(bit) is int and bit in (0, 1) for bit in mask)):
        raise ValueError(
            "response_mask must be null or a list of 0 and 1, one for each token added since the previous call"
        )
    return mask


class _Message(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[dict[str, Any]], FIRST_FAULT] | None = None
    tool_calls: Annotated[list[dict[str, Any]], FIRST_FAULT] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None


class FlatCallBody(BaseModel):
    """`POST /v1/completions` with messages. The flat response cannot represent several choices or a stream."""

    model_config = ConfigDict(extra="allow", strict=True)

    messages: Annotated[list[_Message], Field(min_length=1), FIRST_FAULT]
    model: str = "default"
    temperature: Annotated[FiniteFloat, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[FiniteFloat, Field(ge=0, le=1)] = 1.0
    max_tokens: Annotated[int, Field(ge=1, le=32768)] = 512
    stop: Annotated[list[str], FIRST_FAULT] | None = None
    logprobs: bool = True
    response_mask: Annotated[Annotated[list[int], FIRST_FAULT] | None, BeforeValidator(_bits)] = None
    n: Literal[1] | None = None
    stream: Literal[False] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatCall(CallAdapter):
    """One flat call. `needs_steps`: the body has a mask, which may be null, and earlier steps verify it."""

    mask: Sequence[int] | None
    before: Sequence[Step] = ()
    # Its clients retry without a key (SDK 120bf30); their history only grows, so two different calls never have the same body.
    retries_by_body: bool = True

    def with_steps(self, steps: Sequence[Step]) -> Self:
        return replace(self, before=steps)

    def native(self, models: Mapping[str, str], kind: str | None = None) -> dict[str, Any]:
        """Return the body of the chat call. The model name `default` is removed, so that engines use the one they serve."""
        if self.body.get("model") == _ANY_MODEL and served_as(_ANY_MODEL, models) is None:
            return {name: value for name, value in self.body.items() if name != "model"}
        return self.body

    def recorded(self, plan: Plan) -> Plan:
        """Return the plan to record, with the length of the claimed mask."""
        plan, model = CallAdapter.recorded(self, plan), self.request.get("model")
        extra = {**plan.extra, "form": "osmosis", **({} if self.mask is None else {"mask_claim": len(self.mask)})}
        return replace(plan, model_asked=model if isinstance(model, str) else None, extra=extra)

    def reshape(self, outcome: Outcome) -> Outcome:
        """Return the end in the client's format, and the step with a mismatch of its mask. Engines' errors are unchanged."""
        step = outcome.step
        mismatch = self._mismatch(step)
        if mismatch is not None:
            step = replace(step, extra={**step.extra, "mask_mismatch": mismatch})
        flat = flat_answer(step)
        return replace(outcome, step=step, end=outcome.end if flat is None else flat)

    def answer(self, step: Step) -> bytes | None:
        return flat_answer(step)

    def _mismatch(self, step: Step) -> dict[str, int | None] | None:
        """Return both lengths if the claim differs from the ids; None if it is correct or cannot be verified."""
        if not self.needs_steps or not step.prompts:
            return None
        exact = added_since(step.prompts[0], self.before, longer=_longer_rendering(step))
        claimed, sampled = len(self.mask or ()), sum(self.mask or ())
        if self.mask is None and not exact:
            return None
        return {"claimed": claimed, "exact": exact, "claimed_sampled": sampled} if claimed != exact or sampled else None


def read_flat(endpoint: str, body: Mapping[str, Any], _options: TranslationOptions) -> FlatCall | None:
    """Parse a flat call; None if the body is another call. Raises UnprocessableRequest."""
    if endpoint != _FLAT or "messages" not in body or "prompt" in body:
        return None
    call = validated(FlatCallBody, body)
    chat = {name: value for name, value in body.items() if value is not None and name != "response_mask"}
    chat["messages"] = [_for_chat(message) for message in body["messages"]]
    claims = "response_mask" in body
    return FlatCall(
        request=body, body=chat, mask=call.response_mask, needs_steps=claims, returns_logprobs=call.logprobs
    )


def added_since(prompt: Prompt, before: Iterable[Step], *, longer: int = 0) -> int | None:
    """Return the number of ids that a prompt adds to the latest step that it continues; None if it continues none.

    `longer`: by how many ids the template's rendering of the messages is longer than the prompt. None as well if the rendering
    is shorter than that step, because the template dropped some of it.
    """
    latest = None
    for step in before:
        for choice in step.choices:
            if choice.prompt < len(step.prompts) and _begins_with(prompt, step.prompts[choice.prompt], choice.ids):
                latest = len(prompt) + longer - len(step.prompts[choice.prompt]) - len(choice.ids)
    return None if latest is None or latest < 0 else latest


def _longer_rendering(step: Step) -> int:
    """Return by how many ids the template's rendering is longer than the prompt of a step that was continued by ids.

    Clients count the tokens of a rendering.
    """
    rendered = step.extra.get("continuation", {}).get("rendered")
    return 0 if rendered is None else rendered - len(step.prompts[0])


def flat_answer(step: Step) -> bytes | None:
    """Return the response of a step in the flat format; None if it is incomplete."""
    choices = (step.response or {}).get("choices")
    if step.status != "complete" or step.response is None or not isinstance(choices, list) or not choices:
        return None
    first = choices[0] if isinstance(choices[0], dict) else {}
    sampled = step.choices[0] if step.choices else None
    ids = sampled.ids.tolist() if sampled else []
    prompt = step.prompts[0].tolist() if step.prompts else []
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
    payload = {
        "id": step.response.get("id") or step.step_id,
        "created": int(step.response.get("created") or step.timing.received),
        "object": "chat.completion",
        "model": step.model_asked or step.response.get("model") or _ANY_MODEL,
        # Its clients refuse a null finish reason; "stop" is the default of their schema.
        "choices": [
            {"index": 0, "message": first.get("message"), "finish_reason": first.get("finish_reason") or "stop"}
        ],
        "token_ids": ids,
        "logprobs": [it if isfinite(it) else _NO_LOGPROB for it in sampled.logprobs] if sampled else [],
        "prompt_token_ids": prompt,
        "usage": step.usage or usage,
    }
    return orjson.dumps(payload)


def _begins_with(prompt: Prompt, earlier: Prompt, sampled: Ids) -> bool:
    end = len(earlier) + len(sampled)
    return len(sampled) > 0 and prompt[: len(earlier)] == earlier and prompt[len(earlier) : end] == sampled


def _for_chat(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message in chat's format: without nulls on its top level, and with arguments of calls as text.

    The protocol allows objects as arguments, which vLLM (0.32.0) and OpenAI refuse.
    """
    fields = {name: value for name, value in message.items() if value is not None}
    calls = []
    for call in fields.get("tool_calls") or ():
        function = call.get("function")
        is_object = isinstance(function, Mapping) and isinstance(function.get("arguments"), Mapping)
        text = orjson.dumps(function["arguments"]).decode() if is_object else None
        calls.append({**call, "function": {**function, "arguments": text}} if is_object else call)
    return {**fields, "tool_calls": calls} if calls else fields
