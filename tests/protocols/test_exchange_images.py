"""Images in responses of a real vLLM 0.32 (a tiny LLaVA with random weights, four placeholder tokens for each image)."""

import orjson
import pytest
from tests.support.recorded import ROOTS, load, names, plan_of, play

from proxy.protocols.plan import with_image_tokens
from proxy.trajectory.images import names_in, placed

FOLDER = ROOTS["vllm"] / "images"
CASES = ["one_image", "two_images", "repeated_image", "image_in_tool_result"]
PLACEHOLDER = 4096


def step_of(name, candidates=(PLACEHOLDER,)):
    cassette = load(f"images/{name}")
    plan = with_image_tokens(plan_of(cassette.path, cassette.body), candidates)
    return play(plan, cassette)[2]


@pytest.mark.parametrize("framing", ["n", "s"])
@pytest.mark.parametrize("name", CASES)
def test_each_image_has_a_place_in_the_prompt_of_the_engine(name, framing):
    step = step_of(f"{name}_{framing}_inj")
    images = placed(step, step.prompts[0])

    assert step.exact
    assert names_in(step.request["messages"]) == [image.image for image in images]
    for image in images:
        assert [PLACEHOLDER] * 4 == list(step.prompts[0][image.start : image.start + image.length])
    assert 4 * len(images) == step.usage["prompt_tokens_details"]["multimodal_tokens"]["image"] if step.usage else True


@pytest.mark.parametrize("name", ["one_image", "two_images"])
def test_the_places_are_those_that_the_engine_renders(name):
    step = step_of(f"{name}_n_inj")
    rendered = orjson.loads((FOLDER / f"{name}_render.response.json").read_bytes())
    expected = [(place["offset"], place["length"]) for place in rendered["features"]["mm_placeholders"]["image"]]

    assert rendered["token_ids"] == list(step.prompts[0])
    assert expected == [(image.start, image.length) for image in placed(step, step.prompts[0])]


def test_a_placeholder_in_a_text_is_a_problem():
    """vLLM expands the first one, which is the text's."""
    step = step_of("placeholder_in_text_n_inj")

    assert ("image_count",) == step.problems
    assert [(None, None)] == [(image.start, image.length) for image in placed(step, step.prompts[0])]


def test_images_of_an_unknown_placeholder_have_no_places_and_no_problem():
    step = step_of("two_images_n_inj", ())

    assert step.exact
    assert {"ids": names_in(step.request["messages"]), "token": None} == step.extra["images"]


@pytest.mark.parametrize("name", names("images/*invalid*") + names("images/no_image*"))
def test_what_the_engine_rejects_is_recorded_with_its_error(name):
    step = play(plan_of(load(name).path, load(name).body), load(name))[2]

    assert ("error", 400) == (step.status, step.response["status"])
    assert names_in(step.request["messages"]) == step.extra["images"]["ids"]


@pytest.mark.parametrize(("name", "count"), [("image", 1), ("other", 10)])
def test_the_name_of_a_placeholder_is_one_token(name, count):
    body = orjson.loads((FOLDER / f"lookup_{name}.response.json").read_bytes())

    assert count == len(body["tokens"])
    assert (PLACEHOLDER in body["tokens"]) == (name == "image")
