"""Marin's Rollout (247c3a9): one prompt and one response, and therefore one for each turn, without a mask.

The first steps of a group's rollouts are the first RolloutGroup, and must have the same prompt; later steps are grouped by
their prompts.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Final

from proxy.export.base import COUNT, FLAG, IDS, JSON, LOGPROBS, REWARD, TEXT, Columns, Inexpressible, Rows
from proxy.export.sequence_view import RowSource, token_rewards
from proxy.export.turn_view import TurnRow, TurnView, step_reward
from proxy.trajectory.sequence import temperature_of

_UNKNOWN: Final = -1  # Marin's default
# The fields of RolloutDecodingTrace and their names in requests.
_DECODING: Final = {
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "min_output_tokens": "min_tokens",
    "stop_strings": "stop",
    "stop_token_ids": "stop_token_ids",
    "seed": "seed",
}


class MarinFormat(TurnView):
    """One Rollout for each turn. `decoding` requires a known temperature and `max_tokens`."""

    name = "marin"
    reward_place = "token"
    reward = "required"
    whole = False
    columns: ClassVar[Columns] = {
        "env_name": TEXT,
        "env_example_id": TEXT,
        "prompt_tokens": IDS,
        "response_tokens": IDS,
        "response_logprobs": LOGPROBS,
        "token_rewards": LOGPROBS,
        "episode_reward": REWARD,
        "is_truncated": FLAG,
        "metadata": {"worker_id": TEXT, "timestamp": REWARD, "weight_step": COUNT},
        "decoding": JSON,
    }

    def turn(self, turn: TurnRow, source: RowSource) -> dict[str, Any]:
        """Return the rollout. The example is `env_example_id` in the metadata, or else the group."""
        facts = source.facts
        one_by_one = token_rewards(turn.step.step_id, len(turn.ids), source)
        fields = {
            "env_name": source.env_name(),
            "env_example_id": str(facts.metadata.get("env_example_id") or facts.group_id or facts.rollout_id),
            "prompt_tokens": turn.prompt,
            "response_tokens": turn.ids,
            "response_logprobs": turn.logprobs,
            "token_rewards": one_by_one or [step_reward(turn.step, source)] * len(turn.ids),
            "episode_reward": source.reward(),
            "is_truncated": turn.truncated,
            "metadata": {
                "worker_id": "",
                "timestamp": turn.step.timing.received,
                "weight_step": _weight_step(turn, source),
            },
        }
        decoding = _decoding(turn)
        return {**fields, "decoding": decoding} if decoding else fields

    def order(self, members: Sequence[Rows]) -> list[tuple[int, int]]:
        return [entry for group in _grouped(members) for entry in group]

    def gather(self, members: Sequence[Rows]) -> Any:
        """Return the RolloutGroups: one of first steps, then one for each prompt of later steps."""
        firsts = [member.rows[0]["prompt_tokens"] for member in members if member.rows]
        if any(prompt != firsts[0] for prompt in firsts):
            raise Inexpressible("Format 'marin' requires that all rollouts of a group begin with the same prompt.")
        return [{"rollouts": [members[number].rows[index] for number, index in group]} for group in _grouped(members)]

    def flat(self, entry: Any) -> list[Any]:
        return list(entry["rollouts"])


def _grouped(members: Sequence[Rows]) -> list[list[tuple[int, int]]]:
    """Group the rows by their prompt, as (member, row of that member)."""
    groups: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for number, member in enumerate(members):
        for index, row in enumerate(member.rows):
            groups.setdefault(tuple(row["prompt_tokens"]), []).append((number, index))
    return list(groups.values())


def _weight_step(turn: TurnRow, source: RowSource) -> int:
    versions = sorted({span.policy_version or "" for span in turn.choice.spans} or {turn.step.policy_version or ""})
    if len(versions) > 1:
        versions_text = " and ".join(map(repr, versions))
        raise source.refuse("one policy version per step", f"{versions_text} at step {turn.step.step_id!r}")
    return source.version(turn.step.step_id, versions[0]) if versions[0] else _UNKNOWN


def _decoding(turn: TurnRow) -> dict[str, Any] | None:
    sampling = turn.step.sampling
    temperature, max_tokens = temperature_of(turn.step), sampling.get("max_tokens")
    if temperature is None or max_tokens is None:
        return None
    stop = sampling.get("stop")
    found = {name: sampling.get(field) for name, field in _DECODING.items()}
    return {
        **found,
        "stop_strings": [stop] if isinstance(stop, str) else stop,
        "strategy": "sample" if temperature > 0 else "greedy",
        "temperature": temperature,
        "max_output_tokens": max_tokens,
        "ignore_eos": bool(sampling.get("ignore_eos", False)),
    }
