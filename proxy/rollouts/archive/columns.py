"""The columns of archived rollouts: name, type and meaning. The same in every file of a schema version."""

from typing import Final

SCHEMA: Final = 1  # readers accept files up to this version; a new column that readers can ignore does not change it
SCHEMA_KEY: Final = b"tokentape.schema"  # in the metadata of a file

# Types: text, json (JSON as text), ids (list of int32), floats (list of float32), texts (list of text), time (UTC), and
# Arrow's names. Numbers of a choice: struct of ids and logprobs.
COLUMNS: Final[dict[str, tuple[str, str]]] = {
    "rollout_id": ("text", "The rollout of the step."),
    "group_id": ("text", "The group of the rollout."),
    "rollout_status": ("text", "completed, failed, aborted or truncated."),
    "reward": ("double", "The reward of the rollout."),
    "advantages": ("json", "The advantages of the rollout, as they were posted."),
    "metadata": ("json", "The metadata of the rollout."),
    "created_at": ("time", "When the rollout was created."),
    "finished_at": ("time", "When the rollout was finished."),
    "touched_ms": ("int64", "When the rollout was written last, in Unix milliseconds: its version."),
    "index": ("int32", "The position of the step in its rollout; null in the only row of a rollout without steps."),
    "step_id": ("text", "The step."),
    "received_at": ("time", "When the call arrived."),
    "duration_s": ("double", "The time from its arrival to the last byte of the engine's response."),
    "status": ("text", "complete, partial or error."),
    "delivered": ("bool_", "Whether the client received the whole response."),
    "late": ("bool_", "Whether the step was stored after the rollout was finished."),
    "exact": ("bool_", "Whether the step passed every fidelity check."),
    "problems": ("texts", "The codes of the checks that it failed."),
    "dialect": ("text", "The dialect of the call."),
    "model": ("text", "The model that the engine served."),
    "engine": ("text", "The name of the engine."),
    "policy": ("text", "The policy of the model."),
    "policy_version": ("text", "The policy version when the call was sent."),
    "temperature": ("double", "The sampling temperature, if it is known."),
    "finish_reason": ("text", "The finish reason of the first choice."),
    "prompt_ids": ("ids", "All token ids of the prompt (of the first prompt, if there are several)."),
    "completion_ids": ("ids", "The sampled token ids of the first choice."),
    "logprobs": ("floats", "The logprob of each of them."),
    "more_prompts": ("prompts", "The ids of the other prompts of a call with several."),
    "more_choices": ("choices", "The ids and logprobs of the other choices."),
    "request": ("json", "The request of the client."),
    "sent": ("json", "What the proxy changed in it."),
    "response": ("json", "The response of the engine."),
    "head": ("json", "The facts of the step, as the store has them: usage, sampling, timing, spans of choices, …"),
    "record_schema": ("int32", "For the import: the schema of the record; null if `record` has it."),
    "rest": ("binary", "For the import: experts and masks of the choices."),
    "record": ("binary", "For the import: the record itself, if it is not equal to its columns."),
    "blocks": ("blocks", "For the import: the blocks of `record`."),
    "rollout": ("json", "For the import, in the first row of a rollout: its fields, counts and marks."),
    "group": ("json", "For the import, in the first row of a group's first rollout in the file: its fields and marks."),
}
