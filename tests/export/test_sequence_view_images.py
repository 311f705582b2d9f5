"""The images of rows."""

import pytest
from tests.support import worked

from proxy.export import FORMATS, Inexpressible, Rows
from proxy.trajectory.sequence import Options

NAME, WEB = "0f" * 16, "https://example.com/a.png"
PAD = 102  # of worked.P
PLACED = [{"image": NAME, "start": 1, "length": 1}, {"image": WEB, "start": 8, "length": 1}]
WITH_PLACE = {
    "sequences": lambda row: row["images"],
    "steps": lambda row: row["images"],
    "verl": lambda row: row["multi_modal_data"]["images"],
    "slime": lambda row: row["multimodal_inputs"]["images"],
    "openrlhf": lambda row: row["images"],
    "trl": lambda row: row["images"][0],
    "scored_data": lambda row: row["images"][0],
}


def with_images(*names, token=PAD):
    """Return the example's steps; the first image is in the first prompt, others follow the first reply."""
    first = {"request_key": "a", "images": {"ids": list(names[:1]), "token": token}}
    second = {"request_key": "b", "mask_claim": 4, "images": {"ids": list(names), "token": token}}
    ids = [*worked.P, *worked.S1, 301, 302, PAD, 304]
    step = worked.second(extra=second)
    return [worked.first(extra=first), worked.make_step("b", ids, step.choices[0], extra=second, policy_version="4")]


def test_sequences_name_each_image_with_the_place_of_its_placeholder():
    (row,) = worked.rows("sequences", with_images(NAME, WEB))

    assert PLACED == row["images"]
    assert [PAD, PAD] == [row["token_ids"][place["start"]] for place in row["images"]]


def test_packed_rows_have_the_images_too():
    plan = FORMATS["sequences"].plan(worked.FACTS, with_images(NAME, WEB), Options())

    assert [PLACED] == [row["images"] for row in plan.pack()]


def test_images_of_unknown_places_have_null():
    """Steps of one sequence have equal images then."""
    steps = with_images(NAME, token=None)
    (row,) = worked.rows("sequences", steps)

    assert [{"image": NAME, "start": None, "length": None}] == row["images"]


def test_a_row_that_max_len_cuts_has_the_images_that_are_left():
    (row,) = worked.rows("sequences", with_images(NAME, WEB), options=Options(max_len=7))

    assert PLACED[:1] == row["images"]


@pytest.mark.parametrize("name", ["verl", "slime", "openrlhf", "trl", "scored_data"])
def test_trainers_get_references_in_order(name):
    """A path of the control API, or the URL."""
    (row,) = worked.rows(name, with_images(NAME, WEB))

    assert [f"/rollouts/r1/images/{NAME}", WEB] == WITH_PLACE[name](row)


@pytest.mark.parametrize("name", sorted(WITH_PLACE))
def test_rows_without_images_have_no_field_for_them(name):
    for row in worked.rows(name):
        assert not {"images", "multi_modal_data", "multimodal_inputs"} & row.keys()


@pytest.mark.parametrize("name", ["trl", "scored_data"])
def test_all_rows_of_a_batch_have_images_if_one_has(name):
    form = FORMATS[name]
    members = [form.rows(worked.FACTS, steps, Options()) for steps in (worked.STEPS, with_images(NAME, WEB))]

    assert [[], [f"/rollouts/r1/images/{NAME}", WEB]] == form.gather(members)["images"]
    assert "images" not in form.gather([members[0], Rows(members[0].rows, [])])


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - WITH_PLACE.keys() - {"atif", "verifiers"}))
def test_formats_without_a_place_for_images_refuse_the_rollout(name):
    """Its ids without the images are another prompt. `atif` and `verifiers` have the images in their messages."""
    with pytest.raises(Inexpressible, match="no place for images; rollout 'r1' has 2"):
        worked.rows(name, with_images(NAME, WEB))
