"""The routes of an engine that speaks vLLM's protocol.

Holds the reading of requests and what answers that sample nothing; replies are made by `chat`, `completions`
and `generate`.
"""

from typing import Any

from aiohttp import web

from proxy.simulator.engine import as_gauge, as_json, read_body
from proxy.simulator.errors import scale_out_disabled
from proxy.simulator.prompts import chat_prompt, text_prompts, text_to_tokenize
from proxy.simulator.requests import Common, new_version, read_chat, read_common, read_completions
from proxy.simulator.routes import VERSION, EngineRoutes
from proxy.simulator.vllm.chat import ChatReply
from proxy.simulator.vllm.completions import CompletionsReply
from proxy.simulator.vllm.generate import GenerateReply, generate_prompt, read_generate
from proxy.simulator.weights import Versions


class VllmRoutes(EngineRoutes):
    """The routes of one engine."""

    __slots__ = ()

    owned_by = "tokentape-simulator"
    text_key = "prompt"

    def table(self) -> list[web.RouteDef]:
        """All of them."""
        return [
            *super().table(),
            web.post("/v1/chat/completions", self.chat),
            web.post("/v1/completions", self.completions),
            web.post("/inference/v1/generate", self.generate),
            web.post("/tokenize", self.tokenize),
            web.post("/update_weight_version", self.update_weight_version),
            web.get("/weight_info", self.weight_info),
            web.get("/version", self.version),
            web.get("/ping", self.health),
            web.get("/metrics", self.metrics),
        ]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/chat/completions`."""
        engine = self._engine
        body = await read_body(request)
        common = read_common(body, engine.options)
        head = engine.head(self._name("chatcmpl", request, common), common)
        chat = read_chat(body)
        prompt = chat_prompt(chat, common, engine.model, engine.options)
        reply = ChatReply(chat, common, engine.model, head, prompt, lambda: f"chatcmpl-tool-{engine.new_hex()}")
        return await engine.answer(request, common, reply, scores_prompt=common.prompt_logprobs is not None)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/completions`."""
        engine = self._engine
        body = await read_body(request)
        common = read_common(body, engine.options)
        head = engine.head(self._name("cmpl", request, common), common)
        completions = read_completions(body)
        prompts = text_prompts(completions, common, engine.model, engine.options)
        reply = CompletionsReply(completions, common, engine.model, head, prompts)
        scores = common.prompt_logprobs is not None or bool(completions.echo)
        return await engine.answer(request, common, reply, scores_prompt=scores)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """`POST /inference/v1/generate`: tokens in, tokens out."""
        engine = self._engine
        if not engine.options.scale_out:
            raise scale_out_disabled()
        asked, common = read_generate(await read_body(request), engine.options)
        prompt = generate_prompt(asked, common, engine.model, engine.options)
        head = engine.head(self._name("generate-tokens", request, common), common)
        versions = Versions()
        reply = GenerateReply(asked, common, engine.model, engine.options, head, prompt, versions)
        scores = common.prompt_logprobs is not None
        return await engine.answer(request, common, reply, versions, scores_prompt=scores)

    async def tokenize(self, request: web.Request) -> web.Response:
        """`POST /tokenize`: the ids of a prompt or of rendered messages."""
        body = await read_body(request)
        tokenizer = self._engine.model.tokenizer
        ids = tokenizer.encode(text_to_tokenize(body))
        strings = [tokenizer.decode([i]) for i in ids] if body.get("return_token_strs") else None
        window = self._engine.options.max_model_len
        return as_json({"count": len(ids), "max_model_len": window, "tokens": ids, "token_strs": strings})

    async def weight_info(self, request: web.Request) -> web.Response:
        """`GET /weight_info`: the label of the weights."""
        return as_json({"weight_version": self._engine.weights.version})

    async def update_weight_version(self, request: web.Request) -> web.Response:
        """`POST /update_weight_version`: tokens from now on are sampled under another label."""
        version = new_version(await read_body(request))
        self._engine.weights.version = version
        return as_json({"success": True, "new_version": version})

    async def version(self, request: web.Request) -> web.Response:
        """`GET /version`: says honestly that this is no vLLM."""
        return as_json({"version": VERSION})

    async def metrics(self, request: web.Request) -> web.Response:
        """`GET /metrics`: the one gauge that tells whether a call was aborted."""
        labels = f'engine="0",model_name="{self._engine.options.model}"'
        told = "Number of requests in model execution batches."
        return as_gauge("vllm:num_requests_running", labels, told, self._engine.running)

    def _model_card(self) -> dict[str, Any]:
        return super()._model_card() | {"permission": []}

    def _name(self, kind: str, request: web.Request, common: Common) -> str:
        """The id of an answer, which the client may choose."""
        return f"{kind}-{request.headers.get('X-Request-Id') or common.request_id or self._engine.new_hex()}"
