"""SGLang's routes."""

from aiohttp import web

from proxy.simulator.engine import gauge_response, json_response, read_body
from proxy.simulator.errors import RequestError
from proxy.simulator.given_ids import with_fault
from proxy.simulator.history import prepare_for_sglang
from proxy.simulator.prompts import chat_prompt, ids_to_return, text_prompts
from proxy.simulator.requests import CommonFields, new_version, read_completions
from proxy.simulator.routes import VERSION, EngineRoutes
from proxy.simulator.sglang.chat import SglangChatResponse
from proxy.simulator.sglang.completions import SglangCompletionsResponse
from proxy.simulator.sglang.generate import NativeResponse, native_prompts
from proxy.simulator.sglang.requests import (
    read_native,
    read_sglang_chat,
    read_sglang_common,
    read_sglang_fields,
    sglang_max_tokens,
)
from proxy.simulator.sglang.wire import LogprobFormatter, ResponseMetadata
from proxy.simulator.weights import WeightVersions


class SglangRoutes(EngineRoutes):
    """The routes of one SGLang engine."""

    __slots__ = ()

    owned_by = "sglang"
    text_key = "text"
    skips_special_tokens = True

    def table(self) -> list[web.RouteDef]:
        """Return all routes; some have an older path, too."""
        return [
            *super().table(),
            web.post("/v1/chat/completions", self.chat),
            web.post("/v1/completions", self.completions),
            web.post("/generate", self.generate),
            web.post("/v1/tokenize", self.tokenize),
            web.post("/tokenize", self.tokenize),
            web.post("/v1/detokenize", self.detokenize),
            web.post("/abort_request", self.abort_request),
            web.post("/update_weight_version", self.update_weight_version),
            web.get("/server_info", self.server_info),
            web.get("/get_server_info", self.server_info),
            web.get("/model_info", self.model_info),
            web.get("/get_model_info", self.model_info),
            web.get("/metrics", self.metrics),
        ]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Handle `POST /v1/chat/completions`."""
        engine = self._engine
        body = await read_body(request)
        fields = read_sglang_fields(body, request.headers, engine.options)
        chat = read_sglang_chat(body, fields)
        common = read_sglang_common(body, engine.options)
        if fields.input_ids is not None:
            engine.model.check_ids(fields.input_ids)
        ids = with_fault(fields.input_ids, engine.options.faults)
        prompt = chat_prompt(chat, common, engine.model, engine.options, ids=ids, max_tokens_rule=sglang_max_tokens)
        metadata = self._metadata(fields.rid)
        head = engine.head(metadata.id, common)
        response = SglangChatResponse(
            chat,
            common,
            fields,
            engine.options,
            head,
            prompt,
            self._formatter(common),
            metadata,
            self._new_call_id,
        )
        return await engine.respond(request, common, response, metadata.versions, rid=metadata.rid(common))

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Handle `POST /v1/completions`."""
        engine = self._engine
        body = await read_body(request)
        fields = read_sglang_fields(body, request.headers, engine.options)
        completions, common = read_completions(body), read_sglang_common(body, engine.options)
        prompts = text_prompts(completions, common, engine.model, engine.options, sglang_max_tokens)
        metadata = self._metadata(fields.rid)
        head = engine.head(metadata.id, common)
        formatter = self._formatter(common)
        response = SglangCompletionsResponse(completions, common, fields, head, prompts, formatter, metadata)
        return await engine.respond(request, common, response, metadata.versions, rid=metadata.rid(common))

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Handle `POST /generate`, whose errors have another form than those of the OpenAI endpoints."""
        engine = self._engine
        try:
            native, common = read_native(await read_body(request), engine.options)
            prompts = native_prompts(native, common, engine.model, engine.options)
        except RequestError as error:
            is_validation = error.kind == "Bad Request"
            return json_response({"error": str(error) if is_validation else {"message": str(error)}}, error.status)
        metadata = self._metadata(native.rid)
        formatter = self._formatter(common)
        response = NativeResponse(native, common, engine.model, engine.options, prompts, formatter, metadata)
        scores_prompt = bool(native.return_logprob)
        rid = None if native.is_batch else metadata.rid(common)
        return await engine.respond(request, common, response, metadata.versions, scores_prompt=scores_prompt, rid=rid)

    async def tokenize(self, request: web.Request) -> web.Response:
        """Handle `POST /v1/tokenize`: a prompt or rendered messages to ids."""
        ids = ids_to_return(await self.body_to_tokenize(request), self._engine.model, prepare_for_sglang)
        return json_response({"tokens": ids, "count": len(ids), "max_model_len": self._engine.options.max_model_len})

    async def abort_request(self, request: web.Request) -> web.Response:
        """Handle `POST /abort_request`: running calls whose id begins with `rid` end; the response is empty in any case."""
        rid = (await read_body(request)).get("rid")
        if isinstance(rid, str) and rid:
            for name in self._engine.aborted:
                self._engine.aborted[name] |= name.startswith(rid)
        return web.Response()

    async def update_weight_version(self, request: web.Request) -> web.Response:
        """Handle `POST /update_weight_version`: a new label; aborts running calls unless `abort_all_requests` is false."""
        body = await read_body(request)
        version = new_version(body)
        self._engine.weights.version = version
        if body.get("abort_all_requests", True):
            self._engine.weights.aborts += 1
        message = f"Weight version updated to {version}"
        return json_response({"success": True, "message": message, "new_version": version})

    async def server_info(self, request: web.Request) -> web.Response:
        """Handle `GET /server_info`; the version is one that no SGLang has."""
        options = self._engine.options
        info = {"model_path": options.model, "context_length": options.max_model_len}
        return json_response({**info, **self._parsers, "version": VERSION})

    async def model_info(self, request: web.Request) -> web.Response:
        """Handle `GET /model_info`."""
        info = {
            "model_path": self._engine.options.model,
            "tokenizer_path": self._engine.options.model,
            "is_generation": True,
            "served_model_name": self._engine.options.model,
            "preferred_sampling_params": None,
            "weight_version": self._engine.weights.version,
        }
        return json_response({**info, **self._parsers})

    async def metrics(self, request: web.Request) -> web.Response:
        """Handle `GET /metrics`: the number of running calls, the one gauge that shows whether a call was aborted."""
        labels = f'model_name="{self._engine.options.model}"'
        return gauge_response(
            "sglang:num_running_reqs", labels, "The number of running requests.", self._engine.running
        )

    @property
    def _parsers(self) -> dict[str, str | None]:
        """The names of the parsers that `proxy.simulator.parser` behaves like."""
        has_parser = self._engine.options.has_parser
        return {
            "reasoning_parser": "qwen3" if has_parser else None,
            "tool_call_parser": "qwen25" if has_parser else None,
        }

    def _metadata(self, rid: str | None) -> ResponseMetadata:
        response_id = rid or self._engine.new_hex() + self._engine.new_hex()
        return ResponseMetadata(response_id, WeightVersions(), self._engine.weights)

    def _formatter(self, common: CommonFields) -> LogprobFormatter:
        temperature = 1.0 if common.temperature is None else common.temperature
        return LogprobFormatter(self._engine.model.tokenizer, temperature)

    def _new_call_id(self) -> str:
        return f"call_{self._engine.clock.entropy(12).hex()}"
