"""ManagedServer with the interface of Atropos' own (296a0bc), over a rollout of the proxy.

A node has the ids and logprobs that the proxy recorded, never ids of a text.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn, Self, TypeVar
from uuid import uuid4
from warnings import warn

from tokentape.control_api import ControlApi
from tokentape.nodes import (
    Nodes,
    Sample,
    SequenceNode,
    ToolCallTranslator,
    completion_text,
    dummy_text,
    render_prompt,
    starts_with_bos,
)
from tokentape.transport import ClientError, require
from tokentape.types import OpenedRollout, Step

with suppress(ImportError):  # `import tokentape` works without openai; the constructor raises
    from openai import NOT_GIVEN, AsyncOpenAI

if TYPE_CHECKING:
    from openai.types import Completion
    from openai.types.chat import ChatCompletion

T = TypeVar("T")

PROMPT_FIELDS: Final = ("prompt", "messages", "input_ids")
_NOT_SUPPORTED: Final = (
    "ManagedServerAdapter supports chat.completions.create and completions.create; for {}, call the proxy directly"
)
NO_TOKENS: Final = frozenset({"no_token_ids", "no_prompt_ids", "no_logprobs"})


class InexactStep(Exception):
    """A recorded step is not exact, so it makes no node. `response` is the response of the engine."""

    def __init__(self, step: Step, response: Any) -> None:
        reasons = " ".join(step["fidelity"]["why"])
        super().__init__(f"step {step['step_id']} of rollout {step['rollout_id']} is not exact: {reasons}")
        self.step = step
        self.response = response


class ManagedServer:
    """Sends calls through the proxy, and keeps a SequenceNode for each conversation.

    `server` is the AsyncClient of the proxy. `tokenizer` has `encode`, `decode` and, for `_convert_messages_to_prompt`,
    `apply_chat_template`; without one, chat nodes have an empty `full_text` and completions are sent as text. Set
    `tool_parser` if the engine parses tool calls; without it `tools` are not sent. The first call opens the rollout with
    the options `rollout`; the end of `async with` finishes it. A rollout passed as `opened` is not finished. Without
    `async with`, call `close`.

    If the engine returns no ids, a call raises NotImplementedError; with `allow_dummy_tokens` it makes nodes of placeholder
    values, with `dummy_tokens` in the metadata. A step that is not exact raises InexactStep.
    """

    def __init__(
        self,
        server: ControlApi,
        tokenizer: Any = None,
        track_tree: bool = False,  # noqa: FBT001, FBT002 - Atropos' signature
        tool_parser: str | None = None,
        preserve_think_blocks: bool = False,  # noqa: FBT001, FBT002
        *,
        opened: OpenedRollout | None = None,
        rollout: Mapping[str, Any] | None = None,
        allow_dummy_tokens: bool = False,
    ) -> None:
        require("openai", user="ManagedServer", requirement="openai>=2")
        if preserve_think_blocks:
            raise NotImplementedError(
                "preserve_think_blocks is not supported: the engine renders the messages, and its chat template decides "
                "which reasoning stays; pass rollout={'continuation': 'append'} to keep the reasoning that was sampled"
            )
        self.server = server
        self.tokenizer = tokenizer
        self.track_tree = track_tree
        self.tool_parser = tool_parser
        self.opened = opened
        self._finishes = opened is None
        self._rollout_options = dict(rollout or {})
        self._allow_dummy_tokens = allow_dummy_tokens
        self._nodes = Nodes(track_tree=track_tree)
        self._translator = ToolCallTranslator()
        self._agent: AsyncOpenAI | None = None
        self._opening = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
        if self.opened is None or not self._finishes:
            return
        try:
            await self.server.finish_rollout(self.opened["rollout_id"], "completed" if error is None else "failed")
        except ClientError as conflict:
            if conflict.status != 409:  # the block finished it with another status, which stays
                raise

    async def close(self) -> None:
        """Close the connections; the rollout does not change."""
        if self._agent is not None:
            await self._agent.close()

    @property
    def current_nodes(self) -> list[SequenceNode]:
        """The nodes of the default mode."""
        return self._nodes.current

    @property
    def sequences(self) -> dict[str, SequenceNode]:
        """The nodes of tree mode by their texts; see `get_state`."""
        return self._nodes.sequences

    def get_state(self) -> dict[str, Any]:
        """Copy the nodes: {nodes: [SequenceNode]}, or in tree mode {sequences: {full_text: SequenceNode}, tree: same}.

        Of equal texts, all but the first have a NUL and a number at their end.
        """
        return self._nodes.state()

    def reset(self) -> None:
        """Remove the nodes; the rollout does not change."""
        self._nodes.clear()

    async def chat_completion(self, **body: Any) -> "ChatCompletion":
        """Sample `n` completions of `messages`; further arguments are the engine's. Tool calls are plain dicts."""
        engine_fields = _engine_body(body)
        if self.tool_parser is None and engine_fields.pop("tools", None):
            engine_fields.pop("tool_choice", None)
            warn("tools are sent only with a tool_parser: ManagedServer(..., tool_parser='hermes')", stacklevel=2)
        agent = await self._agent_for(engine_fields)
        model, messages = engine_fields.pop("model", NOT_GIVEN), engine_fields.pop("messages")
        raw = await agent.chat.completions.with_raw_response.create(
            model=model, messages=messages, extra_body=engine_fields, extra_headers=_idempotency_key()
        )
        response: ChatCompletion = raw.parse()
        step = await self._step(raw.headers)
        decode = getattr(self.tokenizer, "decode", None)
        if self._is_exact(step, response):
            choices = step["choices"]
            self._grow(step, [decode([*_prompt(step, choice), *choice["ids"]]) if decode else "" for choice in choices])
        else:
            self._grow_dummies(step, [dummy_text(messages, choice.message.content) for choice in response.choices])
        for choice in response.choices:  # some engines return [] for no tool calls
            choice.message.tool_calls = [call.model_dump() for call in choice.message.tool_calls or ()] or None  # type: ignore[misc]
        self._translator.remember(response, step, self.tokenizer)
        return response

    async def completion(self, **body: Any) -> "Completion":
        """Sample `n` completions of `prompt`, a text or ids; further arguments are the engine's.

        A prompt that starts with the `full_text` of a node is sent as the ids of that node and the ids of the rest, so that
        it continues the node, even if its text alone would have other ids.
        """
        engine_fields = _engine_body(body)
        agent = await self._agent_for(engine_fields)
        model, prompt = engine_fields.pop("model", NOT_GIVEN), engine_fields.pop("prompt")
        if isinstance(prompt, str) and starts_with_bos(self.tokenizer, prompt):
            engine_fields.setdefault("add_special_tokens", False)
        raw = await agent.completions.with_raw_response.create(
            model=model, prompt=self._ids(prompt), extra_body=engine_fields, extra_headers=_idempotency_key()
        )
        response: Completion = raw.parse()
        step = await self._step(raw.headers)
        if self._is_exact(step, response):
            texts = [
                completion_text(self.tokenizer, _prompt(step, recorded), recorded["ids"], choice.text)
                for recorded, choice in zip(step["choices"], response.choices, strict=True)
            ]
            prompt_text = prompt if isinstance(prompt, str) else self._text(prompt)
            self._grow(step, [prompt_text + text for text in texts])
        else:
            self._grow_dummies(step, [f"{prompt}{choice.text}" for choice in response.choices])
        return response

    async def get_logprobs(self, **body: Any) -> dict[str, Any]:
        """Return the `top_k` (1) most likely ids at each position of `prompt`, `messages` or `input_ids`, with logprobs.

        {prompt_tokens: [int], prompt_topk_token_ids: [[int]], prompt_topk_logprobs: [[float]]}; the lists of the first
        position are empty. The call's rollout is deleted. Raises NotImplementedError if the engine has no prompt logprobs.
        """
        return await _prompt_logprobs(self.server, body)

    def _convert_messages_to_prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        return render_prompt(self.tokenizer, self._translator.convert_messages_for_template(messages), tools)

    def _get_translator(self) -> ToolCallTranslator | None:
        return None if self.tool_parser is None else self._translator

    async def _agent_for(self, engine_fields: Mapping[str, Any]) -> "AsyncOpenAI":
        """Return the OpenAI client of the rollout; the first call opens the rollout."""
        if engine_fields.get("stream"):
            raise ValueError("ManagedServer does not stream: remove stream, or call the proxy directly")
        async with self._opening:
            if self._agent is None:
                self.opened = self.opened or await self.server.open_rollout(**self._rollout_options)
                self._agent = AsyncOpenAI(base_url=self.opened["base_url"], api_key=self.opened["api_key"])
        return self._agent

    async def _step(self, headers: Mapping[str, str]) -> Step:
        assert self.opened is not None, "a call was made, so its rollout is open"
        return await self.server.step(self.opened["rollout_id"], headers["X-Step-Id"])

    def _is_exact(self, step: Step, response: Any) -> bool:
        """Return True if the step makes nodes, False if it makes placeholders. Raises otherwise."""
        problems = set(step["fidelity"]["problems"])
        if step["fidelity"]["exact"]:
            if any(choice["ids"] and not choice["logprobs"] for choice in step["choices"]):
                raise NotImplementedError(
                    "nodes require logprobs, and the proxy does not request any (record.logprobs: off)"
                )
            return True
        if not problems & NO_TOKENS:
            raise InexactStep(step, response)
        if not self._allow_dummy_tokens:
            raise NotImplementedError(
                f"engine {step['engine']['name']!r} returns text only, and nodes require ids and logprobs "
                f"({', '.join(sorted(problems))}); allow_dummy_tokens=True makes placeholders, which cannot be trained on"
            )
        return False

    def _grow(self, step: Step, texts: Sequence[str]) -> None:
        """Add the nodes of all choices, prompt by prompt."""
        for number in sorted({choice["prompt"] for choice in step["choices"]}):
            pairs = [pair for pair in zip(step["choices"], texts, strict=True) if pair[0]["prompt"] == number]
            samples = [
                Sample(
                    text,
                    choice["ids"],
                    [logprob for logprob in choice["logprobs"] if logprob is not None],
                    choice["finish_reason"],
                )
                for choice, text in pairs
            ]
            self._nodes.grow(_prompt(step, pairs[0][0]), samples)

    def _grow_dummies(self, step: Step, texts: Sequence[str]) -> None:
        self._nodes.add_dummies(texts, [choice["finish_reason"] for choice in step["choices"]])

    def _ids(self, prompt: Any) -> Any:
        """Return the prompt; if it starts with the text of a node, the ids of the node and of the rest."""
        node = (
            self._nodes.longest_text_prefix(prompt) if isinstance(prompt, str) and self.tokenizer is not None else None
        )
        if node is None:
            return prompt
        rest = prompt[len(node.full_text) :]
        return [*node.tokens, *(self.tokenizer.encode(rest, add_special_tokens=False) if rest else ())]

    def _text(self, ids: Any) -> str:
        return str(self.tokenizer.decode(ids)) if self.tokenizer is not None else ""


def _prompt(step: Step, choice: Mapping[str, Any]) -> Sequence[int]:
    single = step["prompt_ids"]
    return step["prompts"][choice["prompt"]] if single is None else single


def _idempotency_key() -> dict[str, str]:
    """Return a header that makes one step of a call and its automatic retries by openai's client."""
    return {"Idempotency-Key": uuid4().hex}


def _engine_body(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call as engines accept them, without the arguments of Atropos' own servers."""
    body = {name: value for name, value in arguments.items() if name != "split"}  # selects one of Atropos' semaphores
    if "max_new_tokens" in body:
        body["max_tokens"] = body.pop("max_new_tokens")
    return body


async def _prompt_logprobs(server: ControlApi, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """See `ManagedServer.get_logprobs`.

    vLLM returns them as `prompt_logprobs` of a call that samples one token. The call runs in a rollout that is deleted
    afterwards, so that nothing trains on that token.
    """
    body = _engine_body(arguments)
    present = [name for name in PROMPT_FIELDS if body.get(name) is not None]
    if len(present) != 1:
        raise ValueError(
            f"get_logprobs requires exactly one of {', '.join(PROMPT_FIELDS)}; got {' and '.join(present) or 'none'}"
        )
    prompt = body.pop(present[0])
    top_k = int(body.pop("top_k", None) or body.pop("top_logprobs", None) or 1)
    model = body.pop("model", NOT_GIVEN)
    body = {"max_tokens": 1, **body, "n": 1, "temperature": 0.0, "top_p": 1.0, "prompt_logprobs": top_k}
    opened = await server.open_rollout(metadata={"purpose": "get_logprobs"})
    try:
        async with AsyncOpenAI(base_url=opened["base_url"], api_key=opened["api_key"]) as agent:
            if present == ["messages"]:
                chat = await agent.chat.completions.with_raw_response.create(
                    model=model, messages=prompt, extra_body=body
                )
                headers, positions = chat.headers, getattr(chat.parse(), "prompt_logprobs", None)
            else:
                raw = await agent.completions.with_raw_response.create(model=model, prompt=prompt, extra_body=body)
                headers, positions = raw.headers, getattr(raw.parse().choices[0], "prompt_logprobs", None)
        step = await server.step(opened["rollout_id"], headers["X-Step-Id"])
    finally:
        await server.delete_rollout(opened["rollout_id"])
    if positions is None or not step["prompt_ids"]:
        raise NotImplementedError(f"engine {step['engine']['name']!r} returns no prompt logprobs")
    return {"prompt_tokens": step["prompt_ids"], **_most_likely(positions, top_k)}


def _most_likely(positions: list[Mapping[str, Mapping[str, float]] | None], top_k: int) -> dict[str, list[list[Any]]]:
    """Return the k most likely ids of each position; vLLM adds the prompt's own id if it is not among them."""
    ranked = [
        sorted(((entry["logprob"], int(token)) for token, entry in (position or {}).items()), reverse=True)[:top_k]
        for position in positions
    ]
    return {
        "prompt_topk_token_ids": [[token for _, token in position] for position in ranked],
        "prompt_topk_logprobs": [[logprob for logprob, _ in position] for position in ranked],
    }


class ManagedServerAdapter:
    """`chat.completions.create` and `completions.create` of a ManagedServer. `base_url` is an attribute only."""

    def __init__(self, managed_server: ManagedServer, base_url: str) -> None:
        self.managed_server = managed_server
        self.base_url = base_url
        self.chat = _Chat(_Completions(managed_server.chat_completion))
        self.completions = _Completions(managed_server.completion)

    async def post(self, *_: Any, **__: Any) -> NoReturn:
        """Not supported: raises NotImplementedError."""
        raise NotImplementedError(_NOT_SUPPORTED.format("post"))

    def copy(self, **_: Any) -> NoReturn:
        """Not supported: raises NotImplementedError."""
        raise NotImplementedError(_NOT_SUPPORTED.format("copy"))


@dataclass(frozen=True, slots=True)
class _Completions(Generic[T]):
    create: Callable[..., Coroutine[Any, Any, T]]


@dataclass(frozen=True, slots=True)
class _Chat:
    completions: "_Completions[ChatCompletion]"
