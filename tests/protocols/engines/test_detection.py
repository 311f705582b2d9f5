"""The engine type is detected from a server's responses to a few probes."""

import orjson
import pytest
from tests.support.recorded import load, load_http

from proxy.protocols.engines import ENGINES, PROBE_PATHS, identify_engine
from proxy.protocols.engines.base import ProbeResponse, Traits
from proxy.protocols.engines.sglang import read_vocabulary_size
from proxy.protocols.engines.vllm import abort_path, has_prompt_field

NO_PARSER = {"reasoning_parser": None, "tool_call_parser": None}
MODEL_FACTS = {"model_path": "m", "weight_version": "default", "reasoning_parser": None, "tool_call_parser": "qwen25"}


def responses(**bodies) -> dict[str, ProbeResponse]:
    paths = {"/" + name.replace("__", "/"): body for name, body in bodies.items()}
    return {path: ProbeResponse(200 if path in paths else 404, "uvicorn", paths.get(path)) for path in PROBE_PATHS}


def models(owner: str) -> dict:
    return {"object": "list", "data": [{"id": "m", "owned_by": owner}]}


@pytest.mark.parametrize(
    ("probed", "traits"),
    [
        (responses(version={"version": "0.32.0"}), Traits("vllm", "0.32.0")),
        (responses(v1__models=models("vllm")), Traits("vllm")),
        (responses(version={"version": "simulator-0.1"}), Traits("vllm", "simulator-0.1")),
        (
            responses(server_info={"version": "0.5.23"}, model_info=MODEL_FACTS),
            Traits("sglang", "0.5.23", has_parser=True),
        ),
        (
            responses(get_server_info={"version": "0.4.9"}, get_model_info={"weight_version": "1"}),
            Traits("sglang", "0.4.9"),
        ),
        (
            responses(server_info={"version": "0.5.23", **NO_PARSER}, v1__models=models("sglang")),
            Traits("sglang", "0.5.23", has_parser=False),
        ),
        (responses(v1__models=models("llamacpp")), Traits("llamacpp")),
        (responses(v1__models=models("somebody")), Traits("plain")),
        (responses(version={"version": 7}, v1__models={"data": "odd"}), Traits("plain")),
        (responses(), Traits("plain")),
    ],
)  # fmt: skip
def test_each_engine_is_detected_by_a_response_of_its_own(probed, traits):
    """Any other server is recorded as text only."""
    assert identify_engine(probed) == traits


def test_llamacpp_is_detected_by_its_server_header():
    """The build is read from /props."""
    probed = responses(props=orjson.loads(load_http("llamacpp", "get_props").response))
    probed["/version"] = ProbeResponse(404, "llama.cpp", None)

    traits = identify_engine(probed)

    assert (traits.kind, traits.version) == ("llamacpp", "b0-unknown")
    assert traits.sampling_defaults["top_k"] == 40


def test_the_recorded_responses_of_vllm_are_detected():
    """`GET /version` and `GET /v1/models` of 0.32.0."""
    version, listed = (orjson.loads(load(name).response) for name in ("get_version", "get_v1_models"))

    assert Traits("vllm", "0.32.0") == identify_engine(responses(version=version))
    assert identify_engine(responses(v1__models=listed)).kind == "vllm"


@pytest.mark.parametrize(
    ("properties", "found"),
    [({"prompt_token_ids": {}}, True), ({"kv_transfer_params": {}}, False), (["prompt_token_ids"], False)],
)
def test_the_field_for_prompt_ids_is_found_in_the_description_of_chat_requests(properties, found):
    """The field in another request, such as vLLM's `CompletionRequest`, does not count."""
    other = {"CompletionRequest": {"properties": {"prompt_token_ids": {}}}}
    described = {"components": {"schemas": {"ChatCompletionRequest": {"properties": properties}, **other}}}

    assert found is has_prompt_field(described)
    assert not any(map(has_prompt_field, (None, [], {"components": {"schemas": other}}, {"components": "text"})))


@pytest.mark.parametrize(
    ("paths", "found"),
    [
        ({"/abort_requests": {}}, "/abort_requests"),
        ({"/abort_requests": {}, "/inference/v1/abort_requests": {}}, "/inference/v1/abort_requests"),
        ({"/v1/completions": {}}, None),
        (["/abort_requests"], None),
        (None, None),
    ],
)
def test_the_route_that_aborts_calls_is_found_among_those_that_a_server_describes(paths, found):
    """The one that requires the API key is preferred."""
    assert abort_path({"paths": paths}) == found
    assert [abort_path(described) for described in (None, [], "paths")] == [None] * 3


@pytest.mark.parametrize(
    ("traits", "is_requested"),
    [
        (Traits("sglang", "0.5.23"), True),
        (Traits("sglang", "0.6.0.post1"), True),
        (Traits("sglang", "0.5.22"), False),
        (Traits("sglang"), False),
    ],
)
def test_only_a_server_that_is_known_to_reject_it_gets_a_bias_of_an_unknown_id(traits, is_requested):
    """An earlier SGLang may read it."""
    assert bool(ENGINES["sglang"].traits_requests(traits)) == is_requested


def test_the_size_of_sglangs_vocabulary_is_in_its_error_for_a_bias():
    recorded = load("recorded/err_unknown_bias_n_plain", "sglang")
    (request,) = ENGINES["sglang"].traits_requests(Traits("sglang", "0.5.23"))
    error = ProbeResponse(400, "uvicorn", None, recorded.response.decode())

    assert (request.path, request.body) == (recorded.path, recorded.body)
    assert request.read(error) == {"vocabulary_size": 4096}


@pytest.mark.parametrize("error", ["", "logit_bias must has keys in [0, many], got 5", "[0, 4095]", "x" * 1000])
def test_another_error_has_no_vocabulary_size(error):
    assert read_vocabulary_size(error) is None


def test_vllms_defaults_are_read_from_a_rendered_chat_request():
    """The recorded request sets only the temperature."""
    rendered = ProbeResponse(200, "uvicorn", orjson.loads(load("scale_out/render_chat").response))
    request, _ = ENGINES["vllm"].traits_requests(Traits("vllm"))

    assert request.path == "/v1/chat/completions/render"
    defaults = {
        "temperature": 1.0, "top_p": 1.0, "min_p": 0.0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    }  # fmt: skip
    assert request.read(rendered) == {"sampling_defaults": defaults}


def test_llamacpps_defaults_are_read_from_its_properties():
    """By the names of request fields."""
    probed = responses(props=orjson.loads(load_http("llamacpp", "get_props").response), v1__models=models("llamacpp"))
    found = identify_engine(probed).sampling_defaults

    assert tuple(found) == ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")
    assert (pytest.approx(0.8), 40) == (found["temperature"], found["top_k"])


@pytest.mark.parametrize(
    "response", [None, [], {}, {"sampling_params": "x"}, {"sampling_params": {"temperature": "1"}}]
)
def test_a_response_of_another_shape_has_no_defaults(response):
    request, _ = ENGINES["vllm"].traits_requests(Traits("vllm"))
    props = {"default_generation_settings": response}

    assert request.read(ProbeResponse(200, "uvicorn", response)) == {"sampling_defaults": None}
    assert identify_engine(responses(props=props, v1__models=models("llamacpp"))).sampling_defaults is None
