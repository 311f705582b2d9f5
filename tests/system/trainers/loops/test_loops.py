"""The code of docs/trainers.md in the trainers' own loops."""

import pytest

SET = {"temperature": 0.7, "top_p": 0.95, "top_k": 50, "max_tokens": 16}


def sampled_with(steps, *names):
    """Return these fields of each step's sampling parameters."""
    return [{name: step["sampling"].get(name) for name in names} for step in steps]


async def test_trl_trains_two_steps_with_the_pages_rollout_function(run, recorded):
    """It passes each prompt twice in a row, and its settings reach every call.

    The ratio of its loss compares with the recorded logprobs.
    """
    made = await run("grpo", model=True, folder=True)
    steps = await recorded()

    recorded_logprobs = sorted(step["choices"][0]["logprobs"] for step in steps)

    assert made["steps"] == len(made["handed"]) == 2
    assert [pytest.approx(row) for row in recorded_logprobs] == sorted(made["compared"])
    prompts = [handed["prompts"] for handed in made["handed"]]
    assert all(first == again != second == last for first, again, second, last in prompts)
    assert sorted(step["choices"][0]["ids"] for step in steps) == sorted(
        ids for handed in made["handed"] for ids in handed["ids"]
    )
    assert sampled_with(steps, *SET, "min_p", "stop") == [{**SET, "min_p": 0.01, "stop": ["zzzz"]}] * 8


async def test_trl_reports_its_logprobs_of_the_rows_that_it_requested(run, recorded):
    """Before the steps, with the engine's weights: they are those that were recorded."""
    made = await run("grpo_mismatch", model=True, folder=True)
    sampled = sum(len(step["choices"][0]["ids"]) for step in await recorded())

    assert sampled == made["tokens"] == made["cells"]["lag"]["0"]["tokens"]
    assert 0 < made["cells"]["all"]["all"]["abs_mean"] < 1e-3  # not 0: computed by another program


async def test_a_plain_torch_loop_reports_a_claimed_group(run, recorded):
    """Its logits are divided by the temperature of each span."""
    made = await run("plain_torch", model=True)
    sampled = sum(len(step["choices"][0]["ids"]) for step in await recorded())

    assert sampled == made["tokens"] == made["cells"]["temperature"]["0.7"]["tokens"]
    assert 0 < made["cells"]["all"]["all"]["abs_mean"] < 1e-3  # not 0: computed by another program
    assert [verdict["verdict"] for verdict in made["returned"]] == ["too_few"]


async def test_trls_asynchronous_trainer_ends_after_its_epochs(run, recorded):
    """Each group is trained once; the trainer's logprobs equal the recorded ones, so the importance ratio is 1."""
    made = await run("async_grpo", model=True, folder=True)
    logs = [log for log in made["log"] if "ratio" in log]
    steps = await recorded()

    assert 2 <= made["steps"] < made["ceiling"]
    assert len(made["groups"]) >= 4  # two epochs of two prompts; the next ones may have started
    assert made["steps"] == len(logs)
    assert [1.0] * len(logs) == pytest.approx([log["ratio"] for log in logs], abs=1e-3)
    assert [{"temperature": 0.7, "max_tokens": 16}] * len(steps) == sampled_with(steps, "temperature", "max_tokens")
    assert {str(version) for version in range(1, made["steps"] + 2)} >= {step["policy_version"] for step in steps}
    assert 0 < made["mismatch"]["tokens"] <= 2 * 16  # the first micro batch
    assert 0 < made["mismatch"]["cells"]["all"]["all"]["abs_mean"] < 1e-3


async def test_verls_worker_makes_a_batch_with_the_pages_loop(run, recorded):
    """Registered by name, padded to the worker's lengths, with the recorded ids and logprobs where the mask is 1."""
    made = await run("verl_worker", model=True)
    tensors, steps = made["tensors"], await recorded()
    rows = zip(tensors["responses"], tensors["response_mask"], tensors["rollout_log_probs"], strict=True)
    trained = [[(i, p) for i, is_sampled, p in zip(*row, strict=True) if is_sampled] for row in rows]
    sampled = [list(zip(step["choices"][0]["ids"], step["choices"][0]["logprobs"], strict=True)) for step in steps]

    assert {(len(rows), len(rows[0])) for rows in tensors.values()} == {(4, 64), (4, 16), (4, 80)}
    assert sorted(sampled) == [[(token, pytest.approx(logprob)) for token, logprob in row] for row in sorted(trained)]
    assert sorted(step["rollout_id"] for step in steps) == sorted(made["rollouts"])
    assert sampled_with(steps, *SET, "repetition_penalty") == [{**SET, "repetition_penalty": 1.0}] * 4


async def test_openrlhf_makes_an_experience_of_the_pages_response(run, recorded):
    """With vLLM's own SamplingParams; ids and logprobs are the recorded ones, shifted by one."""
    made = await run("openrlhf_agent")
    (step,) = await recorded()
    choice, experience = step["choices"][0], made["experience"]
    (mask,), (logprobs,) = experience["action_mask"], experience["rollout_log_probs"]

    assert [[*step["prompt_ids"], *choice["ids"]]] == experience["sequences"]
    assert choice["logprobs"] == pytest.approx([p for is_sampled, p in zip(mask, logprobs, strict=True) if is_sampled])
    assert sampled_with([step], *SET, "min_tokens", "stop") == [{**SET, "min_tokens": 1, "stop": ["zzzz"]}]


async def test_areal_batches_the_pages_episodes(run, recorded):
    """Its check of their format passes, and its batch has the recorded ids where the loss mask is 1."""
    made = await run("areal_workflow")
    steps = await recorded()
    rows = zip(made["input_ids"], made["loss_mask"], made["versions"], strict=True)
    trained = [[(i, v) for i, is_sampled, v in zip(*row, strict=True) if is_sampled] for row in rows]

    assert sorted([(token, 3) for token in step["choices"][0]["ids"]] for step in steps) == sorted(trained)
    assert sampled_with(steps, *SET, "stop") == [{**SET, "stop": ["zzzz"]}] * 2
