"""Rollouts that are continued by ids, without HTTP: an agent, a template engine, and the turns of the proxy."""

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.support.chat_templates import CannotRender, Message, parse_arguments, template
from tests.support.forests import make_choice, make_step
from tests.support.template_engine import Reply, Sample, TemplateEngine

from proxy.continuation.bridge import continue_turn
from proxy.continuation.turns import Match, Sampler, Turns, match
from proxy.continuation.types import Continuation, Detokenize, LookupFailed, Mode, Render

MODEL = "policy"
USER = {"role": "user", "content": "Where is the lake?"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name}.",
            "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "a text"}}},
        },
    }
    for name in ("look_up", "run")
]


@dataclass(frozen=True)
class Turn:
    """One turn: what the model writes, and the messages that the agent adds after it.

    `tools`, `day` and `as_it_came` apply to the call that samples the turn. `others`: other choices of the same call.
    `rollback`: the agent removes the reply and sends `new` in its place.
    """

    reply: Reply
    new: tuple[Message, ...] = ({"role": "user", "content": "And then?"},)
    others: tuple[Reply, ...] = ()
    tools: Sequence[Any] | None = None
    day: int = 0
    as_it_came: bool = False
    rollback: bool = False


@dataclass(frozen=True)
class Plan:
    """A rollout.

    `rewrites`: the agent writes tool arguments again. `keeps_reasoning`: it sends reasoning back. `as_parts`: it sends texts
    as lists of parts. `joins_parts`: after the first call it sends lists of parts as one text. `renames`: it changes the ids
    of tool calls. `drops_specials`: the engine's texts of ids lack special tokens. `ignores_tools`: its lookups render no
    tools. `clock`: the date advances with each rendering. `knows_stops`: the model's EOS has closed turns of earlier
    rollouts. `failing`: each lookup of this number fails. `first`: the messages of the first call.
    """

    template: str
    turns: tuple[Turn, ...]
    mode: Mode = "append"
    first: tuple[Message, ...] = (USER,)
    tools: Sequence[Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    rewrites: bool = True
    keeps_reasoning: bool = False
    trims: bool = False
    as_parts: bool = False
    joins_parts: bool = False
    renames: bool = False
    drops_specials: bool = False
    ignores_tools: bool = False
    clock: bool = False
    knows_stops: bool = True
    failing: int = 0
    seed: int = 0


@dataclass(frozen=True)
class Boundary:
    """A call after the first: what was sent, and what is known about the turn that it continues.

    `result` is None if no turn was found, for `reason`. `renderings`: all messages that were rendered for it, with the ids.
    `day`: the date of the first of them.
    """

    engine: TemplateEngine
    tools: Any
    messages: list[Message]
    found: Match | None
    result: Continuation | None
    reason: str | None
    renderings: list[tuple[list[Message], "array[int]"]]
    is_linear: bool
    day: int
    mode: Mode

    @property
    def bridge(self) -> "array[int]":
        """The ids after the recorded ones."""
        assert self.result is not None
        assert self.result.ids is not None
        return self.result.ids[self.result.kept :]

    @property
    def is_continued(self) -> bool:
        """Whether the call is sent by ids."""
        return self.result is not None and self.result.ids is not None

    def describe(self) -> str:
        """Return the boundary as text, for a failed assertion."""
        lines = [f"template {self.engine.template.name} {self.engine.options}", f"{self.mode}, reason {self.reason}"]
        if self.found is not None and self.result is not None:
            turn = self.found.turn
            lines += [
                f"finish {turn.finish_reason} {turn.stop_reason}",
                f"reply {self.found.reply}",
                f"new {self.found.new}",
                f"sampled {self.engine.detokenize(turn.ids)!r}",
            ]
            if self.is_continued:
                lines.append(f"bridge {self.engine.detokenize(self.bridge)!r}")
        return "\n".join(lines)


class Rollout:
    """A rollout that runs according to a plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.engine = TemplateEngine(template(plan.template), **plan.options)
        self.turns = Turns()
        self.random = Random(plan.seed)
        self.messages: list[Message] = list(plan.first)
        self.steps = self.lookups = 0
        self._renderings: list[tuple[list[Message], array[int]]] = []

    def run(self) -> Iterator[Boundary]:
        """Run all calls, and yield each call after the first. Ends early where the engine rejects the messages."""
        is_linear = True
        for turn in self.plan.turns:
            tools = self.plan.tools if turn.tools is None else turn.tools
            self.engine.day = max(self.engine.day, turn.day)
            body = {
                "model": MODEL,
                "messages": list(self.messages),
                "tools": tools,
                "chat_template_kwargs": dict(self.plan.options),
                "stop_token_ids": self._client_stops(turn.reply),
                "parallel_tool_calls": False if turn.reply.shown_calls is not None else None,
            }
            try:
                boundary = self._continue(body, turn, tools, is_linear)
                prompt = boundary.result.ids if boundary.is_continued else self.engine.render(self.messages, tools)
                samples = [self._sample(reply, tools) for reply in (turn.reply, *turn.others)]
            except CannotRender:
                return
            if self.steps:
                yield boundary
            self._record(body, prompt, samples, boundary, is_limited=turn.reply.ending in {"length", "hidden_length"})
            if self.plan.joins_parts:
                self.messages = [_joined(message) for message in self.messages]
            is_linear = not (turn.rollback or turn.as_it_came)
            if not turn.rollback:
                self.messages.append(self._sent_back(samples[0].message))
            self.messages += [self._added(message) for message in turn.new]

    def _client_stops(self, reply: Reply) -> list[int] | None:
        return [self.engine.encode(reply.stop)[-1]] if reply.ending == "client_stop" else None

    def _sample(self, reply: Reply, tools: Any) -> Sample:
        return self.engine.sample(self.messages, reply, tools, self.random)

    def _continue(self, body: dict[str, Any], turn: Turn, tools: Any, is_linear: bool) -> Boundary:
        found = match(self.turns, body, Sampler("vllm", MODEL), mode=self.plan.mode)
        self._renderings = []
        day, result, reason = self.engine.day, None, found if isinstance(found, str) else None
        if isinstance(found, Match) and not turn.as_it_came:
            result = self._drive(found, tools)
            reason = result.reason if result is not None else "tokenize"
        return Boundary(
            engine=self.engine,
            tools=tools,
            messages=list(self.messages),
            found=found if isinstance(found, Match) else None,
            result=result,
            reason="as_it_came" if turn.as_it_came else reason,
            renderings=self._renderings,
            is_linear=is_linear,
            day=day,
            mode=self.plan.mode,
        )

    def _drive(self, found: Match, tools: Any) -> Continuation | None:
        """Run the lookups of a continuation; None if one failed."""
        steps = continue_turn(found, mode=self.plan.mode, stops=self._stops())
        result: Any = None
        try:
            lookup = next(steps)
            while True:
                self.lookups += 1
                failing = self.plan.failing and self.lookups % self.plan.failing == 0
                if failing and self.lookups % 2:
                    lookup = steps.throw(LookupFailed("the engine is unavailable"))
                    continue
                result = None if failing else self._look_up(lookup, tools)
                lookup = steps.send(result)
        except StopIteration as stop:
            return stop.value
        except LookupFailed:
            return None

    def _stops(self) -> frozenset[int]:
        """Return the ids that are known to close turns, from this rollout and from earlier rollouts of the model."""
        earlier = self.engine.encode(self.engine.template.stops[0]) if self.plan.knows_stops else []
        return frozenset([token for _, _, token in self.turns.stops] + list(earlier))

    def _look_up(self, lookup: Any, tools: Any) -> Any:
        if isinstance(lookup, Detokenize):
            return self.engine.detokenize(lookup.ids, specials=not self.plan.drops_specials)
        assert isinstance(lookup, Render)
        try:
            ids = self.engine.render(lookup.messages, None if self.plan.ignores_tools else tools)
        except CannotRender:
            return None
        self._renderings.append((lookup.messages, ids))
        self.engine.day += self.plan.clock
        return ids

    def _record(
        self, body: dict, prompt: "array[int]", samples: list[Sample], boundary: Boundary, *, is_limited: bool
    ) -> None:
        """Add the step of a call, as the recorder would store it."""
        body = {name: value for name, value in body.items() if value is not None}
        if is_limited:
            body["max_tokens"] = len(samples[0].ids)
        choices = [
            make_choice(index, sample.ids, finish_reason=sample.finish_reason, stop_reason=sample.stop_reason)
            for index, sample in enumerate(samples)
        ]
        answers = [
            {"index": index, "message": sample.message, "finish_reason": sample.finish_reason}
            for index, sample in enumerate(samples)
        ]
        facts = {}
        if boundary.is_continued:
            turn, rendering = boundary.found.turn, boundary.result.rendering
            facts = {
                "step_id": turn.step_id,
                "choice": turn.choice,
                "kept": boundary.result.kept,
                "bridge": boundary.result.bridge,
            }
            if rendering is not None:
                facts |= {
                    "rendered": rendering.length,
                    "rendered_digest": rendering.digest,
                    "rendered_last": rendering.last,
                }
        step = make_step(
            f"{self.steps:03}",
            prompt,
            *choices,
            request=body,
            response={"choices": answers},
            index=self.steps,
            extra={"continuation": facts} if facts else {},
        )
        self.turns.add(step)
        self.steps += 1

    def _sent_back(self, message: Message) -> Message:
        """Return a reply as the agent sends it back."""
        back = deepcopy(dict(message))
        if not self.plan.keeps_reasoning:
            back.pop("reasoning", None)
        if self.plan.trims and back["content"]:
            back["content"] = back["content"].strip()
        for call in back.get("tool_calls", ()):
            function = call["function"]
            if self.plan.rewrites and parse_arguments(function["arguments"]):
                function["arguments"] = json.dumps(json.loads(function["arguments"]))
            if self.plan.renames:
                call["id"] = f"own_{call['id']}"
        if self.plan.as_parts and back["content"]:
            back["content"] = [{"type": "text", "text": back["content"]}]
        return back

    def _added(self, message: Message) -> Message:
        """Return a message that follows a reply, with the agent's ids of calls."""
        if self.plan.renames and "tool_call_id" in message:
            return {**message, "tool_call_id": f"own_{message['tool_call_id']}"}
        return deepcopy(message)


def _joined(message: Message) -> Message:
    """Return a message with its text parts as one text, as vLLM renders them."""
    content = message["content"]
    return {**message, "content": "\n".join(part["text"] for part in content)} if isinstance(content, list) else message
