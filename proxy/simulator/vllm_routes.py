"""The routes of an engine that speaks vLLM's protocol.

Holds the reading of requests and what answers that sample nothing; replies are made by `chat`, `completions`
and `generate`.
"""

from typing import Final

from aiohttp import web

from proxy.simulator.asides import ids_to_detokenize, new_version, text_to_tokenize
from proxy.simulator.chat import ChatReply, chat_prompt
from proxy.simulator.completions import CompletionsReply, text_prompts
from proxy.simulator.faults import scale_out_disabled
from proxy.simulator.generate import GenerateReply, generate_prompt, read_generate
from proxy.simulator.requests import Common, read_chat, read_common, read_completions
from proxy.simulator.serving import Serving, as_gauge, as_json, read_body
from proxy.simulator.weights import Versions

VERSION: Final = "simulator-0.1"


class VllmRoutes:
    """The routes of one engine."""

    __slots__ = ("_serving",)

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    def table(self) -> list[web.RouteDef]:
        """All of them."""
        return [
            web.post("/v1/chat/completions", self.chat),
            web.post("/v1/completions", self.completions),
            web.post("/inference/v1/generate", self.generate),
            web.post("/tokenize", self.tokenize),
            web.post("/detokenize", self.detokenize),
            web.post("/update_weight_version", self.update_weight_version),
            web.get("/weight_info", self.weight_info),
            web.get("/v1/models", self.models),
            web.get("/version", self.version),
            web.get("/health", self.health),
            web.get("/ping", self.health),
            web.get("/metrics", self.metrics),
        ]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/chat/completions`."""
        at = self._serving
        body = await read_body(request)
        common = read_common(body, at.options)
        head = at.head(self._name("chatcmpl", request, common), common)
        chat = read_chat(body)
        prompt = chat_prompt(chat, common, at.model, at.options)
        reply = ChatReply(chat, common, at.model, head, prompt, lambda: f"chatcmpl-tool-{at.new_hex()}")
        return await at.answer(request, common, reply, scores_prompt=common.prompt_logprobs is not None)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/completions`."""
        at = self._serving
        body = await read_body(request)
        common = read_common(body, at.options)
        head = at.head(self._name("cmpl", request, common), common)
        completions = read_completions(body)
        prompts = text_prompts(completions, common, at.model, at.options)
        reply = CompletionsReply(completions, common, at.model, head, prompts)
        scores = common.prompt_logprobs is not None or bool(completions.echo)
        return await at.answer(request, common, reply, scores_prompt=scores)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """`POST /inference/v1/generate`: tokens in, tokens out."""
        at = self._serving
        if not at.options.scale_out:
            raise scale_out_disabled()
        asked, common = read_generate(await read_body(request), at.options)
        prompt = generate_prompt(asked, common, at.model, at.options)
        head = at.head(self._name("generate-tokens", request, common), common)
        versions = Versions()
        reply = GenerateReply(asked, common, at.model, at.options, head, prompt, versions)
        scores = common.prompt_logprobs is not None
        return await at.answer(request, common, reply, versions, scores_prompt=scores)

    async def tokenize(self, request: web.Request) -> web.Response:
        """`POST /tokenize`: the ids of a prompt or of rendered messages."""
        body = await read_body(request)
        tokenizer = self._serving.model.tokenizer
        ids = tokenizer.encode(text_to_tokenize(body))
        strings = [tokenizer.decode([i]) for i in ids] if body.get("return_token_strs") else None
        window = self._serving.options.max_model_len
        return as_json({"count": len(ids), "max_model_len": window, "tokens": ids, "token_strs": strings})

    async def detokenize(self, request: web.Request) -> web.Response:
        """`POST /detokenize`: the text of ids."""
        ids = ids_to_detokenize(await read_body(request))
        self._serving.model.check_ids(ids)
        return as_json({"prompt": self._serving.model.tokenizer.decode(ids)})

    async def weight_info(self, request: web.Request) -> web.Response:
        """`GET /weight_info`: the label of the weights."""
        return as_json({"weight_version": self._serving.weights.version})

    async def update_weight_version(self, request: web.Request) -> web.Response:
        """`POST /update_weight_version`: tokens from now on are sampled under another label."""
        version = new_version(await read_body(request))
        self._serving.weights.version = version
        return as_json({"success": True, "new_version": version})

    async def models(self, request: web.Request) -> web.Response:
        """`GET /v1/models`."""
        options = self._serving.options
        model = {
            "id": options.model,
            "object": "model",
            "created": self._serving.started_s,
            "owned_by": "tokentape-simulator",
            "root": options.model,
            "parent": None,
            "max_model_len": options.max_model_len,
            "permission": [],
        }
        return as_json({"object": "list", "data": [model]})

    async def version(self, request: web.Request) -> web.Response:
        """`GET /version`: says honestly that this is no vLLM."""
        return as_json({"version": VERSION})

    async def health(self, request: web.Request) -> web.Response:
        """`GET /health`."""
        return web.Response()

    async def metrics(self, request: web.Request) -> web.Response:
        """`GET /metrics`: the one gauge that tells whether a call was aborted."""
        labels = f'engine="0",model_name="{self._serving.options.model}"'
        told = "Number of requests in model execution batches."
        return as_gauge("vllm:num_requests_running", labels, told, self._serving.running)

    def _name(self, kind: str, request: web.Request, common: Common) -> str:
        """The id of an answer, which the client may choose."""
        return f"{kind}-{request.headers.get('X-Request-Id') or common.request_id or self._serving.new_hex()}"
