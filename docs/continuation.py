"""Generates docs/continuation.md: how calls continue recorded steps by their token ids, with the reasons from the code."""

from proxy.continuation.types import REASONS

_OPENING = """After this page you know when a conversation stays one sequence, when it does not, and where to see the reason.

An agent sends back text. The engine renders and tokenizes the whole conversation again for each call, and the token ids of
earlier turns differ from those that were sampled: another split of the same text, tool calls in other whitespace, text that
a parser trimmed, reasoning that the chat template drops. Each such boundary is [drift](concepts.md#fidelity). It forks the
rollout into one more sequence, with more tokens to train and a prompt that the KV cache does not contain.

TokenTape therefore sends the prompt of a call that continues a recorded step as **token ids**:

```text
  step 1   │ prompt ids │ sampled ids │
           └─────────────┬────────────┘
                recorded, not rendered again
           ┌─────────────┴────────────┐
  step 2   │ prompt ids │ sampled ids │ bridge │ sampled ids │
                                      └───┬────┘
                   from the engine's rendering of this call: the end of the turn,
                     the new messages (tool results, user), the generation prompt

  mask           0             1          0          1         one sequence
```

The engine renders the messages (`/tokenize`), and the bridge is the end of that rendering: TokenTape has no tokenizer, no
template and no list of models. The response repeats the prompt ids, and TokenTape compares them with those it sent. Agents do
not change: they send messages in any dialect, streamed or not. Branches, retries, sub-agents and several choices work, because
each call continues the step whose messages and reply it repeats.

## Which reply is continued

A call continues the recorded reply that it sends back after the most messages, of the same model, policy and options.
Several recorded replies can be equal in text and calls: those of retries, of several choices (`n`), of sub-agents. Then these
decide, in this order:

1. IDs of tool calls and responses that the engine made and the agent repeats;
2. reasoning that the agent sends back, which must be equal, whitespace apart (what it does not send back is restored);
3. unchanged text before text in other whitespace or arguments in another format;
4. the agent (`X-Agent-Name`), then recorded calls whose messages the call begins with, such as an earlier attempt at it;
5. replies that a client received before those that none did.

If replies with different token ids remain, the call is sent as it came (`ambiguous`). If the agent changed the reasoning,
`faithful` lets the engine render what was sent, and `append` refuses (`edited`). Numbers in arguments are compared as JSON has
them: `1`, `1.0` and `true` are different. A call with prompt ids of its own is never continued by others.

## Modes

- `off`: the engine renders each call.
- `faithful` (default): ids are kept wherever the chat template keeps the turn. Where it drops reasoning or rewrites earlier
  turns, the template decides, and the rollout forks.
- `append`: what was sampled is never rendered again. Each conversation is one growing sequence, with its reasoning.

`append` is for trainers with one row per rollout. Its prompts contain reasoning that the template would drop.

The header of a call has precedence over its rollout, and the rollout over the settings. YAML's `off` without quotes, which is
false, is accepted.

```yaml
continuation: {mode: faithful, timeout_s: 60.0}
```

```bash
curl -s 127.0.0.1:8400/rollouts -d '{"rollout_id": "linear", "continuation": "append"}'
curl -s -X PATCH 127.0.0.1:8400/rollouts/linear -d '{"continuation": "faithful"}'
curl -s 127.0.0.1:8400/rollouts/linear/v1/chat/completions -H 'X-Rollout-Continuation: off' \\
  -H 'Content-Type: application/json' -d '{"model": "policy", "messages": [{"role": "user", "content": "Hello!"}]}'
```

## Engines

| engine | chat | completions | renders with |
|---|---|---|---|
| vLLM (0.32) | `kv_transfer_params.prompt_token_ids` | a list of ids as `prompt` | `/tokenize`, `/detokenize` |
| SGLang (0.5.23, from its source) | `input_ids` | a list of ids as `prompt` | `/v1/tokenize`, `/v1/detokenize` |
| llama.cpp, any other server | not continued | not continued | |

A vLLM whose `/openapi.json` names the field `prompt_token_ids` of chat requests gets the ids there. No release has it
(vllm-project/vllm#55771 is in review), so this is tested with the simulator only.

An SGLang endpoint gets ids for chat only after its rendering of a step's messages was equal to the step's prompt ids.

- The rest of the request does not change: tools, parsers, streaming and structured output work as before. Clients do not see
  the injected fields, and usage is the engine's.
- A continued call costs one rendering, which replaces the tokenization by the call itself. With drift there are two requests to
  `/detokenize`, and in about 15 % of these cases four more renderings, mostly three of a short history and one of the whole
  conversation; at most 15 in `append`, if a reply was cut or is all reasoning. All are sent to the endpoint of the call, within
  `continuation.timeout_s`.
- If the engine returns other prompt ids than were sent, the step is flagged `other_prompt`. If it rejects a call with ids, the
  call is sent again unchanged; if that succeeds, the ids were the reason. In both cases the endpoint gets no more ids until its
  type is detected again.
- The ids of recorded steps are cached in the process (`agents.rollout_cache_bytes`), else read from the store, so that other
  workers and replicas continue them, also after a restart.

A text prompt of `/v1/completions` is continued if it begins with the prompt and the completion of an earlier step, as those of
Atropos' `ManagedServer` do; only the rest is tokenized.

## Chat templates

Measured over the 41 original chat templates of TRL 1.16: linear rollouts of six turns in a fresh process. The sampled text is
split into tokens that no tokenizer would choose; the agent formats arguments in its own way and drops the reasoning. 34 of the
templates render tool loops. In mode `append` **all 518 combinations are one sequence**, and no bridge is wrong:

| rollouts | combinations | one sequence |
|---|---|---|
| text, without and with reasoning | 82 | 82 |
| tool loops, without and with reasoning | 68 | 68 |
| tool loops with content beside the calls, without and with reasoning | 68 | 68 |
| one reply cut by `max_tokens`: in a thought, in a call, in a streamed call, after a call | 177 | 177 |
| one reply that a reasoning parser returns as reasoning only | 41 | 41 |
| one reply that ends with a stop string | 41 | 41 |
| text parts in the first call that are one text in later calls | 41 | 41 |

In mode `faithful`, 167 of the 518 are: where a template drops reasoning, opens thoughts, or closes a cut reply, the template
decides. `make continuation-table` prints both tables, and repeats the first three rows and cut replies with a random model, the
template in each request: on a real vLLM 0.32 321 of 321 rollouts are one sequence in `append`, on a real SGLang 0.5.23 269 of
271 (the others forked once: the model's tokenizer joined the end of a cut text with the template's next letters). `make
test-system` repeats text and tool loops over HTTP with a simulated engine, streamed and not.

## What append keeps

In `append` the sampled ids stay, and what follows them is what the template writes after a turn:

- **Reasoning** that the template drops stays in the prompt.
- **A cut reply** (`max_tokens` within a thought or a call) stays as it was sampled. The template's end of the turn and the new
  messages follow it; what the template would add to complete the call does not.
- **Another stop token**: if the template writes another stop token than was sampled, the sampled one stays in its place.
- **Content beside calls**: some templates write it after the results of the calls (`gemma4`). The prompt has it where it was
  sampled.

**gpt-oss** ends an answer with `<|return|>`, and its template writes `<|end|>` for it in the history. In `append`, the prompt
of the next turn has `<|return|>`: six turns are one sequence. In `faithful`, each answer with a successor forks by this one
token (`other_stop`): six turns of text are six sequences. A tool loop forks only after its answers, since calls end with
`<|call|>` in both. [Its authors](https://github.com/openai/harmony/blob/main/docs/format.md) train with `<|return|>` only as
the last token of a target, and with `<|end|>` in the history, without earlier reasoning. Use `faithful` for prompts as the
model knows them, and `append` for one row per rollout.

**Stop strings** (`stop`): the tokens of the stop string were sampled, and the engine cuts them from the visible text. If a
stop string begins within a token, the prompt has the whole token: with `stop: ["ees"]` the agent receives `B`, and the next
prompt has `Bees`. In `faithful` such a turn is continued only if the visible text ends where a token does. Continued calls
after a stop string have the reason `stop_string`, and are counted with it.

With a random model at temperature 1.5 on a real vLLM 0.32, all rollouts of `make test-engine` are one sequence in `append`,
with templates that keep and that strip reasoning; with `off`, every turn of the second template forks.

## What is not continued

The first call of a conversation, calls without a rollout ID, and `/inference/v1/generate`. Any other call that is not continued
is sent as it came, and the reason is counted:

| reason | meaning |
|---|---|
"""

_MIXED = """
In mode `append`, a continued call has the reason `history` if the template would have rendered the earlier turns differently.
Text parts of a message are equal to the one text that the engine makes of them, and fields of parts such as `cache_control` are
not compared. [Decision 064](decisions/064-exact-continuation.md) has the limits.

## Where to see it

- `tokentape show` has a line for each step, such as:

```text
step 1  01a9…  chat  policy  469 prompt tokens, 31 completion tokens  stop  410 ms  exact
continued: 457 ids kept, 12 ids rendered
```

- `extra.continuation` of a step, and `continuation` of a node of `GET /rollouts/{id}/tree`: the earlier step (`step_id`,
  `choice`), the number of recorded ids (`kept`) and of ids after them (`bridge`), the length of the template's rendering if it
  differs (`rendered`), or the `reason`. In the tree, `why` is its sentence; a drift boundary has both.
- In [`/ui`](ui.md), `»` marks a continued call, and `≠` the reason why a call was not continued.
- The metrics `tokentape_continuations_total` by `result` and `reason`, `tokentape_continuation_duration_seconds` and
  `tokentape_rollout_cache_bytes`, and the row *Continuation* of the dashboard.

| `result` | meaning |
|---|---|
| `continued` | recorded ids were sent in place of a rendering that differs |
| `unchanged` | the rendering begins with the recorded ids: it was sent as ids |
| `refused` | the call was sent as it came, for the reason |
"""


def continuation_page(made: str) -> str:
    """Return the page."""
    rows = "".join(f"| `{code}` | {sentence} |\n" for code, sentence in REASONS.items())
    return f"# Continuation\n\n{made}{_OPENING}{rows}{_MIXED}"
