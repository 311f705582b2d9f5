"""ManagedServer as Atropos' environments use it (296a0bc), over a rollout of the proxy.

Holds what is asked of the engine and what becomes of the answer. A node's ids and logprobs are those that the proxy
recorded, never those that a text might have; how nodes grow stands in `nodes`.
"""

import asyncio
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self
from uuid import uuid4
from warnings import warn

from openai import NOT_GIVEN, AsyncOpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletion

from proxy.client.asking import ClientError
from proxy.client.awaiting import AsyncClient
from proxy.client.nodes import Nodes, Sample, SequenceNode
from proxy.client.rendering import Translator, begins_with_bos, dummy_text, render, text_behind
from proxy.client.scoring import engine_terms, score
from proxy.client.shapes import Opened, Step

TEXT_ONLY: Final = frozenset({"no_token_ids", "no_prompt_ids", "no_logprobs"})


class InexactStep(Exception):
    """What was recorded of a call is not exact: no node is made of it. `reply` is what the engine answered."""

    def __init__(self, step: Step, reply: Any) -> None:
        said = " ".join(step["fidelity"]["why"])
        super().__init__(f"the step {step['step_id']} of the rollout {step['rollout_id']} gives no node: {said}")
        self.step = step
        self.reply = reply


class ManagedServer:
    """Samples through the proxy, and keeps a SequenceNode for each conversation.

    `server` is the AsyncClient of the proxy. `tokenizer` has `encode`, `decode` and, for `_convert_messages_to_prompt`,
    `apply_chat_template`; without one, chat nodes have an empty `full_text` and completions are sent as text. `tool_parser`
    says that the engine parses tool calls; without it `tools` are not sent. The rollout is opened at the first call, on the
    terms `rollout`, and finished at the end of `async with`; one that was `opened` before is left open. Without `async with`,
    `close` it.

    Where the engine tells no ids, a call raises NotImplementedError, or makes nodes of placeholders with
    `allow_dummy_tokens`: their metadata says `dummy_tokens`. What is recorded and not exact raises InexactStep.
    """

    def __init__(
        self,
        server: AsyncClient,
        tokenizer: Any = None,
        track_tree: bool = False,  # noqa: FBT001, FBT002 - as in Atropos
        tool_parser: str | None = None,
        preserve_think_blocks: bool = False,  # noqa: FBT001, FBT002
        *,
        opened: Opened | None = None,
        rollout: Mapping[str, Any] | None = None,
        allow_dummy_tokens: bool = False,
    ) -> None:
        if preserve_think_blocks:
            raise NotImplementedError(
                "preserve_think_blocks: the engine renders the messages, and its template decides which thoughts stay; "
                "see chat_template_kwargs of your model"
            )
        self.server = server
        self.tokenizer = tokenizer
        self.track_tree = track_tree
        self.tool_parser = tool_parser
        self.opened = opened
        self._finishes = opened is None
        self._terms = dict(rollout or {})
        self._allow_dummy_tokens = allow_dummy_tokens
        self._nodes = Nodes(track_tree=track_tree)
        self._translator = Translator()
        self._agent: AsyncOpenAI | None = None
        self._opening = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()
        if self.opened is None or not self._finishes:
            return
        try:
            await self.server.finish_rollout(self.opened["rollout_id"], "completed" if error is None else "failed")
        except ClientError as refused:
            if refused.status != 409:  # it was finished in the block, which knew better how
                raise

    async def close(self) -> None:
        """Close the connections; the rollout stays as it is."""
        if self._agent is not None:
            await self._agent.close()

    @property
    def current_nodes(self) -> list[SequenceNode]:
        """The nodes of the default mode."""
        return self._nodes.current

    @property
    def sequences(self) -> dict[str, SequenceNode]:
        """The nodes of tree mode, by their texts; see `get_state`."""
        return self._nodes.sequences

    def get_state(self) -> dict[str, Any]:
        """A copy of the nodes: {nodes: [SequenceNode]}, or in tree mode {sequences: {full_text: SequenceNode}, tree: same}.

        Texts alike are told apart by a NUL and a number behind all but the first.
        """
        return self._nodes.copies()

    def reset(self) -> None:
        """Forget the nodes; the rollout goes on."""
        self._nodes.clear()

    async def chat_completion(self, **body: Any) -> ChatCompletion:
        """Sample a reply to `messages`, `n` of them; further arguments are the engine's. Tool calls are plain dicts."""
        asked = engine_terms(body)
        if self.tool_parser is None and asked.pop("tools", None):
            asked.pop("tool_choice", None)
            warn("tools are sent only with a tool_parser: ManagedServer(..., tool_parser='hermes')", stacklevel=2)
        agent = await self._ready(asked)
        model, messages = asked.pop("model", NOT_GIVEN), asked.pop("messages")
        raw = await agent.chat.completions.with_raw_response.create(
            model=model, messages=messages, extra_body=asked, extra_headers=_key()
        )
        reply: ChatCompletion = raw.parse()
        step = await self._step(raw.headers)
        decode = getattr(self.tokenizer, "decode", None)
        if self._is_exact(step, reply):
            self._grow(
                step, [decode([*_prompt(step, each), *each["ids"]]) if decode else "" for each in step["choices"]]
            )
        else:
            self._grow_dummies(step, [dummy_text(messages, choice.message.content) for choice in reply.choices])
        for choice in reply.choices:  # an engine may say [] for none
            choice.message.tool_calls = [call.model_dump() for call in choice.message.tool_calls or ()] or None  # type: ignore[misc]
        self._translator.learn(reply, step, self.tokenizer)
        return reply

    async def completion(self, **body: Any) -> Completion:
        """Sample what follows `prompt`, a text (or ids), `n` times; further arguments are the engine's.

        A prompt that begins with a node's `full_text` is sent as that node's ids and those of the rest: so the node goes on,
        whatever ids the text alone would have.
        """
        asked = engine_terms(body)
        agent = await self._ready(asked)
        model, prompt = asked.pop("model", NOT_GIVEN), asked.pop("prompt")
        if isinstance(prompt, str) and begins_with_bos(self.tokenizer, prompt):
            asked.setdefault("add_special_tokens", False)
        raw = await agent.completions.with_raw_response.create(
            model=model, prompt=self._ids(prompt), extra_body=asked, extra_headers=_key()
        )
        reply: Completion = raw.parse()
        step = await self._step(raw.headers)
        if self._is_exact(step, reply):
            said = [
                text_behind(self.tokenizer, _prompt(step, each), each["ids"], choice.text)
                for each, choice in zip(step["choices"], reply.choices, strict=True)
            ]
            before = prompt if isinstance(prompt, str) else self._text(prompt)
            self._grow(step, [before + text for text in said])
        else:
            self._grow_dummies(step, [f"{prompt}{choice.text}" for choice in reply.choices])
        return reply

    async def get_logprobs(self, **asked: Any) -> dict[str, Any]:
        """The `top_k` (1) likeliest ids at each place of `prompt`, `messages` or `input_ids`, and their logprobs.

        {prompt_tokens: [int], prompt_topk_token_ids: [[int]], prompt_topk_logprobs: [[float]]}; nothing is known of the first
        place. Recorded in no rollout that is kept. Raises NotImplementedError where the engine cannot.
        """
        return await score(self.server, asked)

    def _convert_messages_to_prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        return render(self.tokenizer, self._translator.convert_messages_for_template(messages), tools)

    def _get_translator(self) -> Translator | None:
        return None if self.tool_parser is None else self._translator

    async def _ready(self, asked: Mapping[str, Any]) -> AsyncOpenAI:
        """An agent of the rollout, which is opened now if it is not."""
        if asked.get("stream"):
            raise ValueError("ManagedServer gives whole replies: leave stream out, or call the proxy itself")
        async with self._opening:
            if self._agent is None:
                self.opened = self.opened or await self.server.open_rollout(**self._terms)
                self._agent = AsyncOpenAI(base_url=self.opened["base_url"], api_key=self.opened["api_key"])
        return self._agent

    async def _step(self, headers: Mapping[str, str]) -> Step:
        assert self.opened is not None, "a call was made, so its rollout is open"
        return await self.server.step(self.opened["rollout_id"], headers["X-Step-Id"])

    def _is_exact(self, step: Step, reply: Any) -> bool:
        """Whether nodes can be made of a step; False: placeholders are to be. Raises otherwise."""
        problems = set(step["fidelity"]["problems"])
        if step["fidelity"]["exact"]:
            if any(choice["ids"] and not choice["logprobs"] for choice in step["choices"]):
                raise NotImplementedError("a node needs logprobs, and the proxy asks for none (record.logprobs: off)")
            return True
        if not problems & TEXT_ONLY:
            raise InexactStep(step, reply)
        if not self._allow_dummy_tokens:
            raise NotImplementedError(
                f"the engine {step['engine']['name']!r} tells text only, and a node needs ids and logprobs "
                f"({', '.join(sorted(problems))}); allow_dummy_tokens=True gives placeholders, which cannot be trained on"
            )
        return False

    def _grow(self, step: Step, texts: Sequence[str]) -> None:
        """Nodes of all choices, prompt by prompt."""
        for number in sorted({choice["prompt"] for choice in step["choices"]}):
            of_prompt = [pair for pair in zip(step["choices"], texts, strict=True) if pair[0]["prompt"] == number]
            samples = [
                Sample(
                    text,
                    choice["ids"],
                    [each for each in choice["logprobs"] if each is not None],
                    choice["finish_reason"],
                )
                for choice, text in of_prompt
            ]
            self._nodes.grow(_prompt(step, of_prompt[0][0]), samples)

    def _grow_dummies(self, step: Step, texts: Sequence[str]) -> None:
        reasons = [choice["finish_reason"] for choice in step["choices"]]
        self._nodes.add_dummies(texts, reasons)

    def _ids(self, prompt: Any) -> Any:
        """The prompt; where a node's text is its beginning, as the node's ids and the ids of the rest."""
        node = self._nodes.that_begins(prompt) if isinstance(prompt, str) and self.tokenizer is not None else None
        if node is None:
            return prompt
        rest = prompt[len(node.full_text) :]
        return [*node.tokens, *(self.tokenizer.encode(rest, add_special_tokens=False) if rest else ())]

    def _text(self, ids: Any) -> str:
        return str(self.tokenizer.decode(ids)) if self.tokenizer is not None else ""


def _prompt(step: Step, choice: Mapping[str, Any]) -> Sequence[int]:
    """The ids that a choice was sampled behind."""
    one = step["prompt_ids"]
    return step["prompts"][choice["prompt"]] if one is None else one


def _key() -> dict[str, str]:
    """A call that is sent again, as openai's client does it by itself, is one step."""
    return {"Idempotency-Key": uuid4().hex}
