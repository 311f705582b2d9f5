"""Recognition: which engine a server is, by what it answers."""

import orjson
import pytest
from recorded import load, load_http

from proxy.protocols.engines.base import Traits
from proxy.protocols.engines.detection import PROBE_PATHS, ProbeResponse, identify_engine

NO_PARSER = {"reasoning_parser": None, "tool_call_parser": None}
MODEL_FACTS = {"model_path": "m", "weight_version": "default", "reasoning_parser": None, "tool_call_parser": "qwen25"}


def seen(**bodies) -> dict[str, ProbeResponse]:
    paths = {"/" + name.replace("__", "/"): body for name, body in bodies.items()}
    return {path: ProbeResponse(200 if path in paths else 404, "uvicorn", paths.get(path)) for path in PROBE_PATHS}


def models(owner: str) -> dict:
    return {"object": "list", "data": [{"id": "m", "owned_by": owner}]}


@pytest.mark.parametrize(
    ("answers", "traits"),
    [
        (seen(version={"version": "0.32.0"}), Traits("vllm", "0.32.0")),
        (seen(v1__models=models("vllm")), Traits("vllm")),
        (seen(version={"version": "simulator-0.1"}), Traits("vllm", "simulator-0.1")),
        (
            seen(server_info={"version": "0.5.23"}, model_info=MODEL_FACTS),
            Traits("sglang", "0.5.23", has_parser=True),
        ),
        (
            seen(get_server_info={"version": "0.4.9"}, get_model_info={"weight_version": "1"}),
            Traits("sglang", "0.4.9"),
        ),
        (
            seen(server_info={"version": "0.5.23", **NO_PARSER}, v1__models=models("sglang")),
            Traits("sglang", "0.5.23", has_parser=False),
        ),
        (seen(v1__models=models("llamacpp")), Traits("llamacpp")),
        (seen(v1__models=models("somebody")), Traits("plain")),
        (seen(version={"version": 7}, v1__models={"data": "odd"}), Traits("plain")),
        (seen(), Traits("plain")),
    ],
)  # fmt: skip
def test_each_engine_answers_something_that_no_other_does(answers, traits):
    """And what answers nothing of it is taken for text only."""
    assert traits == identify_engine(answers)


def test_llamacpp_says_who_it_is_in_a_header():
    """With its build from /props, as recorded."""
    answers = seen(props=orjson.loads(load_http("llamacpp", "get_props").response))
    answers["/version"] = ProbeResponse(404, "llama.cpp", None)

    traits = identify_engine(answers)

    assert ("llamacpp", "b0-unknown") == (traits.kind, traits.version)
    assert 40 == traits.sampling_defaults["top_k"]


def test_the_recorded_answer_of_vllm_is_recognised():
    """`GET /version` and `GET /v1/models` of 0.32.0."""
    version, listed = (orjson.loads(load(name).response) for name in ("get_version", "get_v1_models"))

    assert Traits("vllm", "0.32.0") == identify_engine(seen(version=version))
    assert "vllm" == identify_engine(seen(v1__models=listed)).kind
