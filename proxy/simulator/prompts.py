"""The prompts of requests: text and ids to continue, and how many tokens the context window leaves for the reply."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from proxy.simulator.errors import bad_value
from proxy.simulator.history import prepare_for_vllm
from proxy.simulator.model import Manner, Model
from proxy.simulator.options import Options
from proxy.simulator.requests import Body, Chat, Common, Completions, Prepare, read_chat
from proxy.simulator.sampler import Draws
from proxy.simulator.template import call_text, render
from proxy.simulator.tool_arguments import make_arguments

_DEFAULT_MAX_TOKENS: Final = 16  # OpenAI's, which vLLM keeps for completions

RoomFor = Callable[[int, int | None, Common, Options], int]
"""How many tokens may be sampled after a prompt of this length, and if this many were asked for."""


def room_for(prompt_length: int, asked: int | None, common: Common, options: Options) -> int:
    """How many tokens may be sampled after a prompt; refuses what does not fit, as vLLM 0.32 does."""
    window = options.max_model_len
    if prompt_length > window:
        message = (
            f"This model's maximum context length is {window} tokens. However, your prompt contains at least "
            f"{window + 1} input tokens, which exceeds this limit even without any output tokens. "
            "Please reduce the length of the input prompt."
        )
        raise bad_value(message, "input_tokens", window + 1)
    if asked is not None and asked > window:
        message = (
            f"max_tokens={asked} cannot be greater than max_model_len={window}. Please request fewer output tokens."
        )
        raise bad_value(message, "max_tokens", asked)
    left = window - prompt_length
    room = left if asked is None else min(asked, left)
    if room < 1:
        raise bad_value(f"max_tokens must be at least 1, got {room}.", "max_tokens", room)
    if common.min_tokens > room:
        message = f"min_tokens must be less than or equal to max_tokens={room}, got {common.min_tokens}."
        raise bad_value(message, "min_tokens", common.min_tokens)
    return room


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The rendered prompt of a chat, and how it shall be replied to."""

    text: str
    ids: Sequence[int]
    manner: Manner


def rendered(chat: Chat) -> str:
    """The text of a chat's prompt; refuses half a surrogate pair, which JSON inside `arguments` can spell."""
    text = render(
        chat.messages,
        tools=chat.tools or (),
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        enable_thinking=chat.enable_thinking,
    )
    try:
        text.encode()
    except UnicodeEncodeError as fault:
        message = "TextEncodeInput must be Union[TextInputSequence, Tuple[InputSequence, InputSequence]]"
        raise bad_value(message) from fault  # vLLM's, of its tokenizer
    return text


def chat_prompt(
    chat: Chat,
    common: Common,
    model: Model,
    options: Options,
    *,
    ids: Sequence[int] | None = None,
    room_for: RoomFor = room_for,
) -> ChatPrompt:
    """Render a chat and plan the reply; refuses what does not fit the model's window. `ids` stand in for the text."""
    text = rendered(chat)
    ids = model.tokenizer.encode(text) if ids is None else ids
    asked = chat.max_completion_tokens if chat.max_completion_tokens is not None else common.max_tokens
    manner = Manner(
        room=room_for(len(ids), asked, common, options),
        alternatives=chat.top_logprobs or 0,
        call=_caller(chat, model),
        thinking=chat.enable_thinking is True and chat.add_generation_prompt,
    )
    if options.script is not None:
        turn, cut = options.script.turn(chat.messages)
        manner = replace(manner, said=model.tokenizer.encode(turn.text), thinking=bool(turn.think), cut=cut)
    return ChatPrompt(text, ids, manner)


def _caller(chat: Chat, model: Model) -> Callable[[Draws], Sequence[int]] | None:
    """What makes the tool call: after a user's message, or if the request insists; None: there is none."""
    insists = chat.tool_choice == "required" or chat.named_tool is not None
    asked = chat.messages[-1].get("role") == "user" and chat.add_generation_prompt
    if not chat.functions or not (insists or asked):
        return None
    function = next(f for f in chat.functions if chat.named_tool in {None, f["name"]})

    def call(draws: Draws) -> Sequence[int]:
        arguments = make_arguments(function.get("parameters"), draws, model.words.texts)
        return model.tokenizer.encode(call_text(function["name"], arguments))

    return call


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """One prompt: its ids, its text, and how it shall be replied to."""

    ids: Sequence[int]
    text: str
    manner: Manner


def text_prompts(
    completions: Completions, common: Common, model: Model, options: Options, room_for: RoomFor = room_for
) -> list[TextPrompt]:
    """The prompts of a request; refuses ids that are no tokens, and what does not fit the model's window."""
    asked = _DEFAULT_MAX_TOKENS if common.max_tokens is None else common.max_tokens
    if asked == 0 and completions.echo:
        asked = 1  # the engine samples one token all the same (cassette `cmpl_echo_mt0`)
    prompts = []
    for prompt in completions.prompts:
        if isinstance(prompt, str):
            ids, text = model.tokenizer.encode(prompt), prompt
        else:
            model.check_ids(prompt)
            ids, text = prompt, model.tokenizer.decode(prompt)
        if not ids:
            raise bad_value("Either prompt or prompt_embeds must be provided and non-empty.")
        manner = Manner(room_for(len(ids), asked, common, options), completions.logprobs or 0)
        prompts.append(TextPrompt(ids, text, manner))
    return prompts


def text_to_tokenize(body: Body, prepare: Prepare = prepare_for_vllm) -> str:
    """The text of a prompt or of rendered messages."""
    if "messages" in body:
        return rendered(read_chat(body, prepare))
    if isinstance(body.get("prompt"), str):
        return str(body["prompt"])
    raise bad_value("Give a prompt that is a string, or messages.", "prompt")
