"""vLLM's routes."""

from aiohttp import web

from proxy.simulator.engine import gauge_response, json_response, read_body
from proxy.simulator.errors import scale_out_disabled
from proxy.simulator.given_ids import reused_ids, with_fault
from proxy.simulator.prompts import chat_prompt, ids_to_return, text_prompts
from proxy.simulator.requests import CommonFields, new_version, read_chat, read_common, read_completions
from proxy.simulator.routes import VERSION, EngineRoutes
from proxy.simulator.vllm.chat import ChatResponse
from proxy.simulator.vllm.completions import CompletionsResponse
from proxy.simulator.vllm.generate import GenerateResponse, generation_options, read_generate
from proxy.simulator.weights import WeightVersions
from proxy.simulator.wire import JsonObject


class VllmRoutes(EngineRoutes):
    """The routes of one vLLM engine."""

    __slots__ = ()

    owned_by = "tokentape-simulator"
    text_key = "prompt"

    def table(self) -> list[web.RouteDef]:
        """Return all routes."""
        return [
            *super().table(),
            web.post("/v1/chat/completions", self.chat),
            web.post("/v1/completions", self.completions),
            web.post("/inference/v1/generate", self.generate),
            web.post("/tokenize", self.tokenize),
            web.post("/update_weight_version", self.update_weight_version),
            web.get("/weight_info", self.weight_info),
            web.get("/version", self.version),
            web.get("/openapi.json", self.openapi),
            web.get("/ping", self.health),
            web.get("/metrics", self.metrics),
        ]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Handle `POST /v1/chat/completions`."""
        engine = self._engine
        body = await read_body(request)
        common = read_common(body, engine.options)
        head = engine.head(self._response_id("chatcmpl", request, common), common)
        given = reused_ids(body, engine.model, has_field=engine.options.has_prompt_field)
        ids = with_fault(given, engine.options.faults)
        chat = read_chat(body, has_ids=ids is not None)
        prompt = chat_prompt(chat, common, engine.model, engine.options, ids=ids)
        response = ChatResponse(chat, common, engine.model, head, prompt, lambda: f"chatcmpl-tool-{engine.new_hex()}")
        return await engine.respond(request, common, response, scores_prompt=common.prompt_logprobs is not None)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Handle `POST /v1/completions`."""
        engine = self._engine
        body = await read_body(request)
        common = read_common(body, engine.options)
        head = engine.head(self._response_id("cmpl", request, common), common)
        completions = read_completions(body)
        prompts = text_prompts(completions, common, engine.model, engine.options)
        response = CompletionsResponse(completions, common, engine.model, head, prompts)
        scores_prompt = common.prompt_logprobs is not None or bool(completions.echo)
        return await engine.respond(request, common, response, scores_prompt=scores_prompt)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Handle `POST /inference/v1/generate`: ids in, ids out."""
        engine = self._engine
        if not engine.options.scale_out:
            raise scale_out_disabled()
        fields, common = read_generate(await read_body(request), engine.options)
        options = generation_options(fields, common, engine.model, engine.options)
        head = engine.head(self._response_id("generate-tokens", request, common), common)
        versions = WeightVersions()
        response = GenerateResponse(fields, common, engine.model, engine.options, head, options, versions)
        scores_prompt = common.prompt_logprobs is not None
        return await engine.respond(request, common, response, versions, scores_prompt=scores_prompt)

    async def tokenize(self, request: web.Request) -> web.Response:
        """Handle `POST /tokenize`: a prompt or rendered messages to ids."""
        body = await self.body_to_tokenize(request)
        tokenizer = self._engine.model.tokenizer
        ids = ids_to_return(body, self._engine.model)
        strings = [tokenizer.decode([i]) for i in ids] if body.get("return_token_strs") else None
        window = self._engine.options.max_model_len
        return json_response({"count": len(ids), "max_model_len": window, "tokens": ids, "token_strs": strings})

    async def weight_info(self, request: web.Request) -> web.Response:
        """Handle `GET /weight_info`: the label of the weights."""
        return json_response({"weight_version": self._engine.weights.version})

    async def update_weight_version(self, request: web.Request) -> web.Response:
        """Handle `POST /update_weight_version`: a new label for the tokens that are sampled from now on."""
        version = new_version(await read_body(request))
        self._engine.weights.version = version
        return json_response({"success": True, "new_version": version})

    async def version(self, request: web.Request) -> web.Response:
        """Handle `GET /version`: a version that no vLLM has."""
        return json_response({"version": VERSION})

    async def openapi(self, request: web.Request) -> web.Response:
        """Handle `GET /openapi.json`, of which only the fields of chat requests for prompt ids are described."""
        fields: JsonObject = {"kv_transfer_params": {}} | (
            {"prompt_token_ids": {}} if self._engine.options.has_prompt_field else {}
        )
        return json_response({"components": {"schemas": {"ChatCompletionRequest": {"properties": fields}}}})

    async def metrics(self, request: web.Request) -> web.Response:
        """Handle `GET /metrics`: the number of running calls, the one gauge that shows whether a call was aborted."""
        labels = f'engine="0",model_name="{self._engine.options.model}"'
        help_text = "Number of requests in model execution batches."
        return gauge_response("vllm:num_requests_running", labels, help_text, self._engine.running)

    def _model_card(self) -> JsonObject:
        return super()._model_card() | {"permission": []}

    def _response_id(self, kind: str, request: web.Request, common: CommonFields) -> str:
        """Return the id of a response, which the client can choose."""
        return f"{kind}-{request.headers.get('X-Request-Id') or common.request_id or self._engine.new_hex()}"
