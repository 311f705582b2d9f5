"""Generates docs/continuation.md: how calls continue recorded steps by their token ids, with the reasons from the code."""

from proxy.continuation.types import REASONS

_OPENING = """\
An agent sends back text, which the engine tokenizes again for each call. The ids of earlier turns can then
differ from the sampled ones: another split of the same text, other whitespace in tool calls, trimmed text, dropped reasoning.
Each such boundary is [drift](concepts.md#fidelity): it forks the rollout into one more sequence, with more tokens to train and
a prompt outside the KV cache.

TokenTape therefore sends the prompt of a call that continues a recorded step as **token ids**; agents do not change:

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

The bridge is the end of the engine's own rendering (`/tokenize`): TokenTape needs no tokenizer or template. It compares the
prompt ids in the response with those it sent.

## Modes

- `off`: the engine renders each call.
- `faithful` (default): ids are kept wherever the chat template keeps the turn. Where it drops reasoning or rewrites earlier
  turns, the rollout forks.
- `append`: what was sampled is never rendered again, also reasoning that the template would drop. Each conversation is one
  growing sequence, for trainers with one row per rollout.

A call's header overrides its rollout, and the rollout the settings; null in a `PATCH` restores the default.

```yaml
continuation: {mode: faithful, timeout_s: 60.0}
```

```bash
curl -s 127.0.0.1:8400/rollouts -d '{"rollout_id": "linear", "continuation": "append"}'
curl -s -X PATCH 127.0.0.1:8400/rollouts/linear -d '{"continuation": "faithful"}'
curl -s 127.0.0.1:8400/rollouts/linear/v1/chat/completions -H 'X-Rollout-Continuation: off' \
  -H 'Content-Type: application/json' -d '{"model": "policy", "messages": [{"role": "user", "content": "Hello!"}]}'
```

## Which reply is continued

A call continues the recorded reply that it sends back after the most messages, of the same model, policy and options. Among
equal replies (retries, `n`, sub-agents), these decide, in this order: repeated IDs of tool calls and responses; equal reasoning
(missing reasoning is restored); unchanged whitespace and format of arguments; the agent (`X-Agent-Name`); recorded calls with
which the call begins; replies that a client received.

If replies with different ids remain, the call is sent as it came (`ambiguous`). If the agent changed the reasoning, `faithful`
lets the engine render it, and `append` refuses (`edited`). In arguments, `1`, `1.0` and `true` are different. A text prompt of
`/v1/completions` is continued if it begins with the prompt and completion of an earlier step.

## Engines

| engine | chat | completions | renders with |
|---|---|---|---|
| vLLM (0.32) | `kv_transfer_params.prompt_token_ids` | a list of ids as `prompt` | `/tokenize`, `/detokenize` |
| SGLang (0.5.23, from its source) | `input_ids` | a list of ids as `prompt` | `/v1/tokenize`, `/v1/detokenize` |
| llama.cpp, any other server | not continued | not continued | |

An SGLang endpoint gets ids for chat only once its rendering of a step equals the step's prompt ids.

- Clients do not see the injected fields.
- A continued call costs one rendering, in place of its own tokenization. With drift it costs two requests to `/detokenize`, and
  in about 15 % of these cases four more renderings (at most 15 in `append`).
- If the engine returns other prompt ids, the step is flagged `other_prompt`. If it rejects the ids, the call is sent again
  unchanged. Such a rollout is not continued at this endpoint, and after
  [three rollouts](decisions/026-values-of-engines.md) none is.
- Ids are cached (`agents.rollout_cache_bytes`), else read from the store, also by other replicas and after a restart.

## What append keeps

- **Reasoning** that the template drops.
- **A cut reply** (`max_tokens` within a thought or a call), followed by the template's end of the turn and the new messages.
- **Another stop token** than the template writes.
- **Content beside calls** in its place, though some templates write it after the results of the calls (`gemma4`).

**gpt-oss** ends an answer with `<|return|>`, and its template writes `<|end|>` for it in the history. `append` keeps
`<|return|>`; in `faithful`, each answer with a successor forks by this token (`other_stop`).
[Its authors](https://github.com/openai/harmony/blob/main/docs/format.md) train with `<|end|>` in the history, without earlier
reasoning: use `faithful` for prompts as the model knows them.

**Stop strings** (`stop`) are sampled, and the engine cuts them from the visible text. If one begins within a token, the prompt
has the whole token: with `stop: ["ees"]` the agent receives `B`, and the next prompt has `Bees`. `faithful` continues such a
turn only if the visible text ends where a token does (reason `stop_string`).

**Measured** with the 41 original chat templates of TRL 1.16 (`make continuation-table`), six turns, tool loops, cut replies,
stop strings, and an agent that reformats arguments and drops reasoning: **all 518 combinations are one sequence** in `append`,
167 in `faithful`. On real engines with a random model, in `append`, 321 of 321 rollouts are one sequence with vLLM 0.32, and
269 of 271 with SGLang 0.5.23 (the tokenizer joined the end of a cut text with the template's next letters).

## What is not continued

The first call of a conversation, calls without a rollout ID, and `/inference/v1/generate`. For any other call that is sent as
it came the reason is counted:

"""

_MIXED = """
In `append`, a continued call has the reason `history` if the template would have rendered the earlier turns differently.
[Decision 064](decisions/064-exact-continuation.md) has the limits.

## Where to see it

- `tokentape show`:

```text
step 1  01a9…  chat  policy  469 prompt tokens, 31 completion tokens  stop  410 ms  exact
continued: 457 ids kept, 12 ids rendered
```

- `extra.continuation` of a step, and `continuation` of a node of `GET /rollouts/{id}/tree`: the earlier step (`step_id`,
  `choice`), the number of recorded ids (`kept`) and of ids after them (`bridge`), the length of the template's rendering if it
  differs (`rendered`), or the `reason`, in the tree with its sentence (`why`). A drift boundary has both.
- In [`/ui`](ui.md), `»` marks a continued call, `≠` the reason why a call was not.
- `tokentape_continuations_total` by `result` and `reason`, and the row *Continuation* of the dashboard.

`result` is `continued` (recorded ids replaced a rendering that differs), `unchanged` (the rendering begins with the recorded
ids and was sent as ids) or `refused` (the call was sent as it came, for the reason).
"""


def continuation_page(made: str) -> str:
    """Return the page."""
    rows = "".join(f"- `{code}`: {sentence}\n" for code, sentence in REASONS.items())
    return f"# Continuation\n\n{made}{_OPENING}{rows}{_MIXED}"
