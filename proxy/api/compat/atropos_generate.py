"""The adapters of `POST /generate` for engines that do not have it: ids in, ids and logprobs out.

Atropos' VLLMServer (296a0bc) calls the script that Atropos ships with its trainer (`prompt.prompt_token_ids`). All others call
SGLang's own endpoint. SGLang gets these calls unchanged; for other engines they are translated if they contain the ids of one
prompt (`input_ids`), as Atropos' SGLangServer sends them. If the engine returned no ids, the response is an error.

Atropos' TrlVllmServer (0.4.0) calls `POST /generate/` of TRL's former vLLM server: texts in, ids out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, Final, Literal

import orjson

from proxy.errors import EngineDisconnected, UnprocessableRequest
from proxy.protocols.dialects.base import TranslationOptions, is_on, openai_error, sample_count
from proxy.protocols.plan import CallAdapter, Outcome, Plan
from proxy.trajectory.step import Choice, Step

GENERATE: Final = "/generate"
TRL_GENERATE: Final = "/generate/"
COMPLETIONS: Final = "/v1/completions"
_SGLANG_NEW_TOKENS: Final = 128  # SGLang's default on /generate; completions would take 16
_TRL_NEW_TOKENS: Final = 16
_TRL_FIELDS: Final = ("images", "generation_kwargs", "guided_decoding_regex", "structured_outputs_regex")
# No format uses the model's generation_config for absent parameters, as completions would.
_SAMPLING: Final = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
_RENAMED: Final = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}
_SGLANG_FIELDS: Final = frozenset({
    "input_ids", "sampling_params", "return_logprob", "return_text_in_logprobs", "stream", "rid", "rollout_id", "metadata",
})  # fmt: skip
_DEFAULT_VALUES: Final = {"logprob_start_len": -1, "top_logprobs_num": 0}  # values that have no effect
_NOT_SAMPLED: Final = "phantom_token"  # the one token of a call for the prompt's logprobs, which the client ignores


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensInCall(CallAdapter):
    """One call of `/generate`, as a completions call."""

    shape: Literal["vllm", "sglang", "trl"]
    scores_prompt: bool = False  # logprobs of the prompt are requested
    fault: UnprocessableRequest | None = None  # why the body cannot be translated
    endpoint: str = COMPLETIONS

    def native(self, models: Mapping[str, str], kind: str | None = None) -> dict[str, Any]:
        """Return the completions call. Its clients send no model, so the alias `*` applies if it is configured."""
        if self.fault is not None and kind is not None:
            raise self.fault
        if kind == "plain":
            raise UnprocessableRequest(
                "The engine of this rollout returns no token ids (kind: plain); use /v1/chat/completions."
            )
        if self.scores_prompt and kind not in {"vllm", None}:
            raise UnprocessableRequest(
                f"prompt_logprobs requires vLLM; the engine of this rollout is {kind}.",
                param="prompt_logprobs",
            )
        return with_any_model(self.body, models)

    def recorded(self, plan: Plan) -> Plan:
        """Return the plan to record. The one token of a call for the prompt's logprobs must not be trained."""
        if self.scores_prompt and plan.body.get("max_tokens") in {0, 1}:
            plan = replace(plan, problems=(*plan.problems, _NOT_SAMPLED), expected=plan.expected | {_NOT_SAMPLED})
        plan = CallAdapter.recorded(self, plan)
        return replace(plan, extra={**plan.extra, "form": f"atropos_{self.shape}"})

    def reshape(self, outcome: Outcome) -> Outcome:
        """Return the end in the client's format; an error if the engine returned no ids."""
        step = outcome.step
        if step.status != "complete":
            return outcome
        response = self.answer(step)
        if response is not None:
            return replace(outcome, end=response)
        missing = "token ids with a logprob for each of them" if self.returns_logprobs else "token ids"
        if self.scores_prompt:
            missing += ", and prompt_logprobs"
        fault = EngineDisconnected(
            f"Engine {step.engine.name} did not return {missing}. Problems of step {step.step_id}: "
            f"{', '.join(step.problems) or 'prompt_logprobs'}"
        )
        return replace(outcome, end=openai_error(fault), status=fault.status)

    def answer(self, step: Step) -> bytes | None:
        """Return the response of a step; None if a sampled id or its logprob is missing."""
        if step.status != "complete" or not step.prompts or not step.choices:
            return None
        if not all(self._is_whole(choice) for choice in step.choices):
            return None
        texts = {choice["index"]: choice.get("text") for choice in (step.response or {})["choices"]}
        if self.shape == "sglang":
            responses = [self._sglang(step, choice, texts[choice.index]) for choice in step.choices]
            return orjson.dumps(responses[0] if self._samples == 1 else responses)
        if self.shape == "trl":
            return orjson.dumps(_trl(step))
        response = self._vllm(step, [texts[choice.index] for choice in step.choices])
        if self.scores_prompt:
            scores = (step.response or {})["choices"][0].get("prompt_logprobs")
            if scores is None:
                return None
            response["prompt_logprobs"] = [  # numbers by id, as the script returns them
                entry and {token: scored["logprob"] for token, scored in entry.items()} for entry in scores
            ]
        return orjson.dumps(response)

    @property
    def _samples(self) -> int | None:
        return sample_count(self.body)

    def _is_whole(self, choice: Choice) -> bool:
        if not choice.ids:
            return self.body.get("max_tokens") == 0
        return not self.returns_logprobs or (
            len(choice.logprobs) == len(choice.ids) and all(isfinite(value) for value in choice.logprobs)
        )

    def _vllm(self, step: Step, texts: list[Any]) -> dict[str, Any]:
        """Return the response in the script's format. The script decodes the prompt; here the text is null."""
        fields: dict[str, Any] = {
            "text": texts,
            "prompt": None,
            "finish_reasons": [choice.finish_reason for choice in step.choices],
        }
        if not self.returns_logprobs:
            return fields
        return {
            **fields,
            "logprobs": [
                [[{str(token): logprob}] for token, logprob in zip(choice.ids, choice.logprobs, strict=True)]
                for choice in step.choices
            ],
            "prompt_token_ids": step.prompts[0].tolist(),
            "token_ids": [choice.ids.tolist() for choice in step.choices],
        }

    def _sglang(self, step: Step, choice: Choice, text: Any) -> dict[str, Any]:
        """Return the response in SGLang's format (0.5.23), with the fields that completions return."""
        meta: dict[str, Any] = {
            "id": (step.response or {}).get("id") or step.step_id,
            "finish_reason": _sglang_reason(choice),
            "prompt_tokens": len(step.prompts[0]),
            "completion_tokens": len(choice.ids),
        }
        if self.returns_logprobs:
            pairs = zip(choice.logprobs, choice.ids, strict=True)
            meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
        return {"text": text, "output_ids": choice.ids.tolist(), "meta_info": meta}


def _trl(step: Step) -> dict[str, Any]:
    """Return the response of TRL's server (0.27), which has prompts once and the samples of each prompt in order."""
    return {
        "prompt_ids": [prompt.tolist() for prompt in step.prompts],
        "completion_ids": [choice.ids.tolist() for choice in step.choices],
        "logprobs": [list(choice.logprobs) for choice in step.choices],
    }


def with_any_model(body: dict[str, Any], models: Mapping[str, str]) -> dict[str, Any]:
    """Return a body without a model with the alias `*`, if it is configured."""
    return body if body.get("model") or "*" not in models else {**body, "model": models["*"]}


def read_generate(_endpoint: str, body: Mapping[str, Any], _options: TranslationOptions) -> TokensInCall:
    """Parse a body of either shape. Raises UnprocessableRequest for an invalid one of vLLM's."""
    prompt = body.get("prompt")
    if isinstance(prompt, Mapping) and "prompt_token_ids" in prompt:
        _check(body)
        return _read_vllm(body, _ids(prompt["prompt_token_ids"], "prompt.prompt_token_ids"))
    own = {"sglang": GENERATE}
    try:
        _check(body)
        return replace(_read_sglang(body), own=own)
    except UnprocessableRequest as fault:
        return TokensInCall(request=body, body={}, shape="sglang", own=own, fault=fault)


def read_trl_generate(_endpoint: str, body: Mapping[str, Any], _options: TranslationOptions) -> TokensInCall:
    """Parse a body of TRL's server. Raises UnprocessableRequest for one without a list of texts."""
    prompts = body.get("prompts")
    if not isinstance(prompts, list) or not prompts or not all(isinstance(prompt, str) for prompt in prompts):
        raise UnprocessableRequest("prompts must be a list of texts.", param="prompts")
    _check(body)
    unknown = next((name for name in _TRL_FIELDS if body.get(name)), None)
    if unknown is not None:
        raise UnprocessableRequest(
            f"Unsupported parameter: {unknown}. The call is sent to /v1/completions, which does not have it.",
            param=unknown,
        )
    own = {"prompts", *_TRL_FIELDS}
    fields = {name: value for name, value in body.items() if name not in own and value is not None}
    sent = {**_SAMPLING, "max_tokens": _TRL_NEW_TOKENS, **fields, "prompt": prompts}
    return TokensInCall(request=body, body=sent, shape="trl", returns_logprobs=True)


def _check(body: Mapping[str, Any]) -> None:
    if is_on(body.get("stream")):
        raise UnprocessableRequest("/generate supports streams with SGLang only; remove `stream`.", param="stream")
    if is_on(body.get("echo")):
        raise UnprocessableRequest(
            "`echo` is not supported because the engine's token ids are unreliable with it; remove `echo`.",
            param="echo",
        )


def _read_vllm(body: Mapping[str, Any], ids: list[int]) -> TokensInCall:
    scores = body.get("prompt_logprobs") is not None
    dropped = {"prompt", "logprobs", "stream"}
    fields = {name: value for name, value in body.items() if name not in dropped and value is not None}
    sent = {**_SAMPLING, **fields, "prompt": ids}
    has_logprobs = body.get("logprobs") is not None
    return TokensInCall(request=body, body=sent, shape="vllm", returns_logprobs=has_logprobs, scores_prompt=scores)


def _read_sglang(body: Mapping[str, Any]) -> TokensInCall:
    if "input_ids" not in body:
        raise UnprocessableRequest(
            "With this engine, /generate requires the token ids of one prompt, as prompt.prompt_token_ids (vLLM) or "
            "input_ids (SGLang). Use /v1/completions for text.",
            param="prompt",
        )
    ids = _ids(body["input_ids"], "input_ids")
    sampling: Any = body.get("sampling_params") or {}
    if not isinstance(sampling, Mapping):
        raise UnprocessableRequest("sampling_params must be an object.", param="sampling_params")
    unknown = sorted(
        name
        for name, value in body.items()
        if name not in _SGLANG_FIELDS and value not in (None, _DEFAULT_VALUES.get(name))
    )
    if unknown:
        raise UnprocessableRequest(
            f"Unsupported parameters: {', '.join(unknown)}. The call is sent to /v1/completions, "
            "which does not have them.",
            param=unknown[0],
        )
    renamed: dict[str, Any] = {
        _RENAMED.get(str(name), str(name)): value for name, value in sampling.items() if value is not None
    }
    named = {name: body[name] for name in ("rid", "rollout_id", "metadata") if name in body}
    fields: dict[str, Any] = {**_SAMPLING, "max_tokens": _SGLANG_NEW_TOKENS, **renamed, **named, "prompt": ids}
    has_logprobs = is_on(body.get("return_logprob"))
    return TokensInCall(request=body, body=fields, shape="sglang", returns_logprobs=has_logprobs)


def _ids(value: Any, name: str) -> list[int]:
    if not isinstance(value, list) or not value or not all(type(token) is int for token in value):
        raise UnprocessableRequest(
            f"{name} must be a list with the token ids of one prompt.", param=name.partition(".")[0]
        )
    return value


def _sglang_reason(choice: Choice) -> dict[str, Any] | None:
    if choice.finish_reason is None:
        return None
    more: dict[str, dict[str, Any]] = {"length": {"length": len(choice.ids)}, "stop": {"matched": choice.stop_reason}}
    return {"type": choice.finish_reason, **more.get(choice.finish_reason, {})}
