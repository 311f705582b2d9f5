"""The list of shapes: each is a request of its own, for the engines that have its fields."""

import itertools

import orjson
import pytest

from proxy.cli.certify.shapes import END_OF_THINKING, SHAPES, biased, constraint


@pytest.mark.parametrize("kind", ["vllm", "sglang", "llamacpp", "plain"])
def test_an_engine_gets_each_shape_once_with_all_its_fields(kind):
    """Names are unique, bodies are different, and none has a field for a text that is still a text."""
    shapes = [shape for shape in SHAPES if shape.is_for(kind)]
    bodies = [(shape.path, orjson.dumps(shape.body_for(kind, "m", {}))) for shape in shapes]

    assert len(shapes) == len({shape.name for shape in shapes}) == len(set(bodies)) > 20
    assert all(shape.modes for shape in shapes)
    assert not any(END_OF_THINKING.encode() in body for _, body in bodies)


def test_topics_are_contiguous():
    """The table has each of them once."""
    topics = [shape.topic for shape in SHAPES]

    assert len(set(topics)) == 1 + sum(one != other for one, other in itertools.pairwise(topics))


def test_a_bias_has_the_ids_of_the_model():
    """A word that is no token of the model has none."""
    body = {"model": "m", "logit_bias": {END_OF_THINKING: 2.0, "<|im_end|>": 1.0}}

    assert biased(body, {END_OF_THINKING: 9}) == {"model": "m", "logit_bias": {"9": 2.0}}
    assert biased(body, {}) == {"model": "m"}


def test_a_constraint_has_each_engines_own_name():
    """llama.cpp has grammars only."""
    assert constraint("a", 'root ::= "a"').keys() == {"vllm", "sglang", "llamacpp"}
    assert constraint("a", "")["vllm"] == {"structured_outputs": {"regex": "a"}}
    assert "llamacpp" not in constraint("a", "")
