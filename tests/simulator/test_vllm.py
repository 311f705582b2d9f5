"""vLLM's chat, completions, generate and label of the weights; test_recorded.py has their shapes and errors."""

from base64 import b64decode

import orjson
import pytest
from tests.support.recorded import load
from tests.support.simulated import HELLO, exchanged, skeleton

from proxy.simulator.options import Options

TINY = Options(model="tiny", max_model_len=2048)
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
IDS = [350, 261]
ALL_TOKENS = {"return_token_ids": True, "logprobs": True}
THINKS = {"chat_template_kwargs": {"enable_thinking": True}}
STOPS = {"stop": ["e c", "The end of all"]}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"temperature": 0},
        {"tools": True},
        {"tools": True, "tool_choice": "required"},
        {"tools": True, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
        {"tools": True, **THINKS},
        THINKS,
        STOPS,
        {"max_tokens": 5},
        {"top_logprobs": 3},
        {"include_reasoning": False},
        {"include_reasoning": False, **THINKS},
    ],
)
async def test_a_streamed_chat_equals_the_unstreamed_one(engine, tools, more):
    """The same seed gives the same ids, logprobs (bit by bit), text, reasoning and calls."""
    more = {**more, "tools": tools} if "tools" in more else more
    whole, streamed = await engine.both(CHAT, messages=HELLO, seed=3, **ALL_TOKENS, **more)

    assert whole == streamed


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 3},
        {"prompt": ["Return the", "If it"], "n": 2},
        {"prompt": [[350, 261], [70]], "echo": True},
        {"prompt": IDS, "logprobs": 3},
        {"stop": "e c"},
        {"stop_token_ids": [46]},
        {"echo": True},
        {"echo": True, "max_tokens": 0},
    ],
)
async def test_streamed_completions_equal_the_unstreamed_ones(engine, more):
    """The same seed gives each choice the same ids, logprobs (bit by bit), text and reasons."""
    body = {"prompt": "Return the", "seed": 3, "max_tokens": 30, "return_token_ids": True, "logprobs": 1, **more}
    whole, streamed = await engine.both(COMPLETIONS, **body)

    assert whole == streamed


@pytest.mark.parametrize("mode", ["tokens", "text"])
async def test_a_streamed_generate_equals_the_unstreamed_one(start, mode):
    """The same seed gives each choice the same ids, logprobs, masks, experts and versions."""
    engine = await start(Options(sampling_mask=True, routed_experts=True))
    sampling = {"seed": 3, "max_tokens": 30, "n": 2, "logprobs": 2}
    body = {"token_ids": IDS, "sampling_params": sampling, "output_mode": mode}
    whole, streamed = await engine.both(GENERATE, **body)
    chunks = await engine.stream(GENERATE, **body, stream_options={"include_usage": True})

    assert {"sampling_mask", "routed_experts", "weight_versions", "token_ids", "logprobs"} < whole["choices"][0].keys()
    assert whole["choices"] == streamed["choices"]
    assert (await engine(GENERATE, **body))["usage"]["completion_tokens"] == chunks[-1]["usage"]["completion_tokens"]


@pytest.mark.parametrize("more", [{}, {"tools": True}, STOPS, {"n": 2}])
async def test_ids_and_logprobs_can_be_stripped(engine, tools, more):
    """Requesting ids and logprobs only fills null values and adds chunks with an empty delta."""
    body = {"seed": 3, "stream_options": {"include_usage": True}, **more}
    if "tools" in more:
        body["tools"] = tools
    plain = await engine.chat_stream(**body)
    stripped = []
    for chunk in await engine.chat_stream(**body, **ALL_TOKENS):
        choice = (chunk["choices"] or [{"delta": None}])[0]
        if choice["delta"] != {} or choice["finish_reason"] is not None:
            stripped.append(chunk)
        for fields in (chunk, choice):
            fields.update({key: None for key in ("prompt_token_ids", "token_ids", "logprobs") if key in fields})

    def known(chunk) -> bytes:
        for call in [call for choice in chunk["choices"] for call in choice["delta"].get("tool_calls", ())]:
            call.pop("id", None)
        return orjson.dumps({**chunk, "id": "", "created": 0})

    assert list(map(known, plain)) == list(map(known, stripped))


async def test_a_tool_is_called_after_a_user_message(engine, tools):
    """The reply is a valid tool call with arguments that fit the schema."""
    choice = (await engine.chat(tools=tools, seed=1))["choices"][0]
    function = choice["message"]["tool_calls"][0]["function"]
    arguments = orjson.loads(function["arguments"])

    assert (choice["finish_reason"], function["name"]) == ("tool_calls", "get_weather")
    assert [(name, type(value)) for name, value in arguments.items()] == [("city", str), ("days", int)]


async def test_calls_of_several_choices_differ(engine, tools):
    completion = await engine.chat(tools=tools, seed=1, n=6)

    assert len({c["message"]["tool_calls"][0]["function"]["arguments"] for c in completion["choices"]}) > 1


async def test_turns_of_a_conversation_extend_each_other(engine, tools):
    """Each prompt of a conversation begins with the earlier prompt and the ids sampled after it."""
    messages, known = [{"role": "user", "content": "How will it be?"}], []
    for result in ("sunny", None, "rain", None):
        completion = await engine.chat(messages, tools=tools, return_token_ids=True, seed=5)
        choice = completion["choices"][0]
        prompt = completion["prompt_token_ids"]
        assert known == prompt[: len(known)]
        known = prompt + choice["token_ids"]
        messages.append({k: v for k, v in choice["message"].items() if v is not None})
        if result is None:
            assert choice["message"]["content"]
            messages.append({"role": "user", "content": "And then?"})
        else:
            call = choice["message"]["tool_calls"][0]
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


async def test_reasoning_comes_first_if_enabled(engine):
    """Usage counts its tokens."""
    completion = await engine.chat(seed=2, **THINKS)
    message = completion["choices"][0]["message"]

    assert message["reasoning"]
    assert message["content"]
    assert completion["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


@pytest.mark.parametrize("more", [{}, THINKS])
async def test_hidden_reasoning_hides_ids_and_logprobs(engine, more):
    """With include_reasoning false, reasoning, ids and logprobs are absent; the prompt's ids are present."""
    body = {"seed": 2, "include_reasoning": False, **ALL_TOKENS, **more}
    completion, chunks = await engine.chat(**body), await engine.chat_stream(**body)
    choice = completion["choices"][0]

    assert not choice["token_ids"]
    assert not choice["logprobs"]
    assert choice["message"]["reasoning"] is None
    assert completion["prompt_token_ids"] == chunks[0]["prompt_token_ids"]


async def test_a_message_can_be_continued(engine):
    """With continue_final_message the prompt ends inside the last message of the assistant."""
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Return the"}]
    body = {"add_generation_prompt": False, "continue_final_message": True, "return_prompt_text": True}

    assert (await engine.chat(messages, **body))["prompt_text"].endswith("assistant\nReturn the")


@pytest.mark.parametrize("more", [{"max_completion_tokens": 3}, {"max_tokens": 3}])
async def test_a_chat_has_a_maximum_length(engine, more):
    completion = await engine.chat(seed=1, **more)

    assert completion["usage"]["completion_tokens"] == 3
    assert completion["choices"][0]["finish_reason"] == "length"


async def test_a_completion_has_16_tokens_by_default(engine):
    completion = await engine.completion("If", seed=1, ignore_eos=True)

    assert completion["usage"]["completion_tokens"] == 16


def names_ids_in_chat(choices) -> bool:
    """Return whether all logprob entries name ids; `bytes` is the token's text, or in alternatives the name."""
    entries = [entry for choice in choices for entry in (choice["logprobs"] or {}).get("content", ())]
    ids = [token for choice in choices for token in choice.get("token_ids") or ()]
    alternatives = [other for entry in entries for other in entry["top_logprobs"]]
    own = b"".join(bytes(entry["bytes"]) for entry in entries)
    return (
        len(entries) > 0
        and (not ids or [f"token_id:{token}" for token in ids] == [entry["token"] for entry in entries])
        and all(entry["token"].removeprefix("token_id:").isdigit() for entry in [*entries, *alternatives])
        and all(bytes(other["bytes"]).decode() == other["token"] for other in alternatives)
        and b"token_id:" not in own
    )


@pytest.mark.parametrize("name", ["chat_ids_lp_asids", "chat_asids_only_stream"])
async def test_tokens_of_a_chat_can_be_named_by_id(start, name):
    """With return_tokens_as_token_ids logprobs name ids as in vLLM, streamed or not."""
    both = await exchanged(await start(TINY), name, ignore_eos=True)
    recorded, simulated = (answer if isinstance(answer, list) else [answer] for answer in both)

    assert set(map(skeleton, recorded)) >= set(map(skeleton, simulated))
    for chunks in (recorded, simulated):
        assert names_ids_in_chat([choice for chunk in chunks for choice in chunk["choices"]])


async def test_alternatives_can_be_named_by_id(engine):
    """Alternatives are the same with and without return_tokens_as_token_ids, with the same logprobs."""
    fields = {"max_tokens": 8, "seed": 1, "logprobs": True, "top_logprobs": 3}
    strings, named = [await engine.chat(**fields, return_tokens_as_token_ids=flag) for flag in (False, True)]
    likely = [
        [[other["logprob"] for other in entry["top_logprobs"]] for entry in chat["choices"][0]["logprobs"]["content"]]
        for chat in (strings, named)
    ]

    assert names_ids_in_chat(named["choices"])
    assert not names_ids_in_chat(strings["choices"])
    assert likely[0] == likely[1]


def names_ids(choice) -> bool:
    """Return whether the logprobs of a completion's choice name ids, with text offsets that count the names."""
    logprobs = choice["logprobs"]
    names = [*logprobs["tokens"], *(name for entry in logprobs["top_logprobs"] for name in entry or ())]
    ends = [offset + len(name) for offset, name in zip(logprobs["text_offset"], logprobs["tokens"], strict=True)]
    return (
        [f"token_id:{token}" for token in choice["token_ids"]] == logprobs["tokens"][-len(choice["token_ids"]) :]
        and all(name.removeprefix("token_id:").isdigit() for name in names)
        and logprobs["text_offset"][1:] == ends[:-1]
    )


@pytest.mark.parametrize("more", [{}, {"logprobs": 3}, {"echo": True}])
async def test_tokens_of_a_completion_can_be_named_by_id(start, more):
    """As in vLLM; in an echoed prompt, too, and in each chunk of a stream."""
    engine = await start(TINY)
    recorded, simulated = await exchanged(engine, "cmpl_asids", ignore_eos=True, **more)
    fields = {"prompt": "Hi", "max_tokens": 6, "logprobs": 2, "return_token_ids": True}
    chunks = await engine.stream(COMPLETIONS, **fields, return_tokens_as_token_ids=True)

    assert all(names_ids(answer["choices"][0]) for answer in (recorded, simulated, *chunks))
    assert more or skeleton(recorded) == skeleton(simulated)


async def logprobs_of_a_prompt(engine, ids, count):
    """Return the logprobs of the last tokens of a prompt of ids."""
    (scored,) = (await engine.completion(ids, max_tokens=1, prompt_logprobs=0))["choices"]
    assert (len(ids), None) == (len(scored["prompt_logprobs"]), scored["prompt_logprobs"][0])
    return [
        entry[str(token)]["logprob"]
        for token, entry in zip(ids[-count:], scored["prompt_logprobs"][-count:], strict=True)
    ]


@pytest.mark.parametrize("more", [{}, {"tools": True}, {**THINKS, "temperature": 0.5}])
async def test_scoring_a_chat_gives_its_logprobs(engine, tools, more):
    """A chat's ids, sent as a prompt with prompt_logprobs, have exactly the logprobs of their sampling."""
    chat = await engine.chat(seed=9, **ALL_TOKENS, **{**more, "tools": tools if "tools" in more else None})
    choice = chat["choices"][0]
    scores = await logprobs_of_a_prompt(
        engine, chat["prompt_token_ids"] + choice["token_ids"], len(choice["token_ids"])
    )

    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == scores


@pytest.mark.parametrize("more", [{}, {"temperature": 0}, {"temperature": 0.6}, {"prompt": IDS}])
async def test_scoring_a_completion_gives_its_logprobs(engine, more):
    body = {"prompt": "Return the", "seed": 5, "max_tokens": 40, "logprobs": 0, "return_token_ids": True, **more}
    (choice,) = (await engine(COMPLETIONS, **body))["choices"]
    ids = choice["prompt_token_ids"] + choice["token_ids"]

    assert choice["logprobs"]["token_logprobs"] == await logprobs_of_a_prompt(engine, ids, len(choice["token_ids"]))


async def test_choices_are_ordered_by_prompt(engine):
    """Choice `i` is sample `i % n` of prompt `i // n`, and sample `k` equals the only sample of seed + `k`."""
    both = await engine.completion(["Return the", "If it is"], n=2, seed=4)
    alone = await engine.completion("If it is", seed=5)

    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    assert both["choices"][3]["text"] == alone["choices"][0]["text"]


async def test_text_and_ids_are_the_same_prompt(engine):
    text = (await engine.completion("Return the", seed=4, return_token_ids=True))["choices"][0]
    ids = (await engine.completion(text["prompt_token_ids"], seed=4))["choices"][0]

    assert text["text"] == ids["text"]


@pytest.mark.parametrize(("more", "text"), [({}, "Return the"), ({"return_token_ids": True}, "")])
async def test_an_echo_is_missing_with_ids(engine, more, text):
    """An echoed prompt precedes the text; with return_token_ids it is missing, as in vLLM."""
    body = {"seed": 4, "max_tokens": 0, "echo": True, **more}
    chunks = await engine.stream(COMPLETIONS, prompt="Return the", **body)

    assert text == (await engine.completion("Return the", **body))["choices"][0]["text"]
    assert text == chunks[0]["choices"][0]["text"]
    assert chunks[0]["choices"][0]["prompt_token_ids"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "If", "seed": 1, "max_tokens": 3}),
        (GENERATE, {"token_ids": IDS, "sampling_params": {"max_tokens": 3, "seed": 1, "ignore_eos": True}}),
    ],
)
async def test_usage_can_be_in_each_chunk(engine, path, body):
    """With continuous_usage_stats each chunk has the number of tokens of its choice so far."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await engine.stream(path, **body, stream_options=options)

    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]


async def test_generate_equals_completions(engine):
    """The same ids and seed give the same tokens and logprobs."""
    sampling = {"seed": 3, "max_tokens": 12, "logprobs": 0, "temperature": 0.7}
    generated = (await engine(GENERATE, token_ids=IDS, sampling_params=sampling))["choices"][0]
    completed = (await engine.completion(IDS, **sampling, return_token_ids=True))["choices"][0]

    assert generated["token_ids"] == completed["token_ids"]
    logprobs = [entry["logprob"] for entry in generated["logprobs"]["content"]]
    assert logprobs == completed["logprobs"]["token_logprobs"]


async def test_masks_and_experts_are_optional(start):
    """If enabled, masks contain the sampled ids, and experts cover all tokens but the last; otherwise both are null."""
    body = {"token_ids": IDS, "sampling_params": {"seed": 3, "max_tokens": 5, "ignore_eos": True}}
    plain = (await (await start(Options()))(GENERATE, **body))["choices"][0]
    enabled = (await (await start(Options(sampling_mask=True, routed_experts=True)))(GENERATE, **body))["choices"][0]

    assert (plain["sampling_mask"], plain["routed_experts"]) == (None, None)
    assert all(token in mask for token, mask in zip(enabled["token_ids"], enabled["sampling_mask"], strict=True))
    assert b"'shape': (6, 2, 2)" in b64decode(enabled["routed_experts"])


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"token_ids": [1]},
        {"token_ids": [], "sampling_params": {}},
        {"token_ids": [-1], "sampling_params": {}},
        {"token_ids": [99_999], "sampling_params": {}},
        {"token_ids": [1], "sampling_params": {"temperature": -1}},
        {"token_ids": [1], "sampling_params": {"logprobs": 99}},
        {"token_ids": [1], "sampling_params": {}, "output_mode": "song"},
        {"token_ids": [1], "sampling_params": {"prompt_logprobs": 1}, "stream": True},
    ],
)
async def test_invalid_requests_of_generate_are_errors(engine, body):
    """Bodies without ids or sampling parameters, or with invalid values, are 400 errors with a message."""
    status, raw = await engine.answer(GENERATE, body)

    assert status == 400
    assert orjson.loads(raw)["error"]["message"]


SLOW = {"token_ids": [5, 6, 7], "sampling_params": {"seed": 1, "max_tokens": 400, "ignore_eos": True}, "stream": True}


async def test_the_label_of_the_weights_can_be_updated(engine):
    """The label is read and updated with the recorded bodies."""
    before, update = load("scale_out/get_weight_info"), load("scale_out/update_weight_version")

    assert orjson.loads(before.response) == orjson.loads((await engine.get("/weight_info"))[1])
    assert orjson.loads(update.response) == await engine(update.path, **update.body)
    assert orjson.loads((await engine.get("/weight_info"))[1]) == {"weight_version": "step-17"}


async def test_scale_out_can_be_disabled(start):
    """Without scale-out, generate returns the recorded error."""
    engine = await start(Options(scale_out=False))

    assert (403, load("derender_cmpl").response) == await engine.answer(GENERATE, SLOW)


async def test_the_version_can_change_during_a_call(start):
    """Tokens after an update of the label have the new version; the spans are contiguous."""
    engine = await start(Options(token_delay_s=0.002))
    async with engine.client.post(GENERATE, json=SLOW) as response:
        first = await response.content.readuntil(b"\n\n")
        await engine("/update_weight_version", new_version="v2")
        rest = await response.read()
    *_, last = [orjson.loads(line[6:]) for line in (first + rest).split(b"\n\n") if line.startswith(b"data: {")]
    first_span, second_span = last["choices"][0]["weight_versions"]

    assert (first_span["version"], first_span["start"]) == ("default", 0)
    assert (second_span["version"], second_span["end"]) == ("v2", 400)
    assert first_span["end"] == second_span["start"]
