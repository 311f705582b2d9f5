"""How a row of each format is read back: as whole sequences (`BACK`), or turn by turn (`TURNS`)."""


def whole(ids, mask, logprobs):
    """Return full-length arrays, as in the canonical row."""
    assert len(ids) == len(mask) == len(logprobs)
    trained_logprobs = [logprob if mark else None for mark, logprob in zip(mask, logprobs, strict=True)]
    return list(ids), list(map(int, mask)), trained_logprobs


def apart(prompt, ids, mask, logprobs):
    """Return prompt and response separately."""
    return whole(prompt + ids, [0] * len(prompt) + mask, [None] * len(prompt) + logprobs)


def unpadded(row):
    attended = row["attention_mask"][0]
    ids = [token for token, mark in zip(row["input_ids"][0], attended, strict=True) if mark]
    prompt = len(row["prompts"][0]) - attended.index(1)
    kept = len(ids) - prompt
    return apart(ids[:prompt], ids[prompt:], row["response_mask"][0][:kept], row["rollout_log_probs"][0][:kept])


def ranged(row):
    mask = [0] * len(row["observation_tokens"])
    for start, end in row["action_ranges"]:
        mask[start:end] = [1] * (end - start)
    return whole(row["observation_tokens"], mask, row["rollout_log_probs"])


# Parsers of the formats with whole sequences.
BACK = {
    "sequences": lambda row: whole(row["token_ids"], row["mask"], row["logprobs"]),
    "nodes": lambda row: whole(row["tokens"], [token != -100 for token in row["masked_tokens"]], row["logprobs"]),
    "scored_data": lambda row: whole(
        row["tokens"][0], [token != -100 for token in row["masks"][0]], row["inference_logprobs"][0]
    ),
    "osmosis": lambda row: apart(row["prompt_ids"], row["response_ids"], row["response_mask"], row["logprobs"]),
    "trl": lambda row: apart(*(row[key][0] for key in ("prompt_ids", "completion_ids", "env_mask", "logprobs"))),
    "trl_async": lambda row: whole(row["input_ids"], row["completion_mask"], row["old_log_probs"]),
    "verl": lambda row: apart(row["prompt_ids"], row["response_ids"], row["response_mask"], row["response_logprobs"]),
    "verl_dataproto": unpadded,
    "slime": lambda row: apart(
        row["tokens"][: -row["response_length"]],
        row["tokens"][-row["response_length"] :],
        row["loss_mask"],
        row["rollout_log_probs"],
    ),
    "skyrl": lambda row: apart(
        *(row[key][0] for key in ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs"))
    ),
    "tinker": lambda row: whole(
        [*row["model_input"], row["target_tokens"][-1]],
        [0, *(advantage != 0 for advantage in row["advantages"])],
        [None, *row["logprobs"]],
    ),
    "prime_rl": lambda row: whole(*row[:3]),
    "areal": lambda row: whole(row["input_ids"][0], row["loss_mask"][0], row["logprobs"][0]),
    "openrlhf": ranged,
    "openrlhf_experience": lambda row: whole(
        row["sequences"][0], [0, *row["action_mask"][0]], [None, *row["rollout_log_probs"][0]]
    ),
}
# Parsers of the formats by turn: prompt, sampled ids, logprobs.
TURNS = {
    "steps": lambda row: (row["prompt_ids"], row["ids"], row["logprobs"]),
    "verifiers": lambda row: tuple(
        row["tokens"][key] for key in ("prompt_ids", "completion_ids", "completion_logprobs")
    ),
    "training_examples": lambda row: (
        row["token_ids"][: row["mask"].index(1)],
        row["token_ids"][row["mask"].index(1) :],
        row["logprobs"][row["mask"].index(1) :],
    ),
    "marin": lambda row: (row["prompt_tokens"], row["response_tokens"], row["response_logprobs"]),
    "skyrl_stepwise": lambda row: tuple(
        row[key][0] for key in ("prompt_token_ids", "response_ids", "rollout_logprobs")
    ),
}


def turns_of(documents):
    """Return the turns of trajectories, and of the embedded ones."""
    for document in documents:
        for step in document["steps"]:
            if metrics := step.get("metrics"):
                yield metrics["prompt_token_ids"], metrics["completion_token_ids"], metrics.get("logprobs")
        yield from turns_of(document["subagent_trajectories"] if document.get("subagent_trajectories") else [])


# Parsers of the formats by conversation: all turns of a row.
CONVERSATIONS = {
    "atif": lambda row: list(turns_of([row])),
    "rollout_detail": lambda row: list(
        zip(row["prompt_token_ids"], row["completion_token_ids"], row["logprobs"], strict=True)
    ),
}


def entries(name, data):
    """Return the rows in the result of a format's `gather`: its list, its lists' entries, or its groups' rows."""
    if isinstance(data, dict):
        count = len(next(iter(data.values()), []))
        return [
            {key: None if value is None else [value[position]] for key, value in data.items()}
            for position in range(count)
        ]
    return [row for group in data for row in group["rollouts"]] if name == "marin" else data


def trained_ids(name, row):
    """Return the token ids that a row trains, in order; none of a row without tokens."""
    if name == "verifiers" and row["tokens"] is None:
        return []
    if name == "tinker":  # by its logprobs: an estimated advantage may be 0
        return [token for token, logprob in zip(row["target_tokens"], row["logprobs"], strict=True) if logprob]
    if name in TURNS:
        return TURNS[name](row)[1]
    if name in CONVERSATIONS:
        return [token for _, ids, _ in CONVERSATIONS[name](row) for token in ids]
    ids, mask, _ = BACK[name](row)
    return [token for token, mark in zip(ids, mask, strict=True) if mark]
