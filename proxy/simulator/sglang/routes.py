"""The routes of an engine that speaks SGLang's protocol.

Holds the reading of requests and what answers that sample nothing; replies are made by `chat`,
`completions` and `generate`.
"""

from aiohttp import web

from proxy.simulator.engine import as_gauge, as_json, read_body
from proxy.simulator.errors import RefusedError
from proxy.simulator.history import prepare_for_sglang
from proxy.simulator.prompts import chat_prompt, text_prompts, text_to_tokenize
from proxy.simulator.requests import Common, new_version, read_completions
from proxy.simulator.routes import VERSION, EngineRoutes
from proxy.simulator.sglang.chat import SglangChatReply
from proxy.simulator.sglang.completions import SglangCompletionsReply
from proxy.simulator.sglang.generate import NativeReply, native_prompts
from proxy.simulator.sglang.requests import read_flags, read_native, read_sglang_chat, read_shared, sglang_room
from proxy.simulator.sglang.wire import Behind, Scoring
from proxy.simulator.weights import Versions


class SglangRoutes(EngineRoutes):
    """The routes of one engine."""

    __slots__ = ()

    owned_by = "sglang"
    text_key = "text"

    def table(self) -> list[web.RouteDef]:
        """All of them; some have an older name, too."""
        return [
            *super().table(),
            web.post("/v1/chat/completions", self.chat),
            web.post("/v1/completions", self.completions),
            web.post("/generate", self.generate),
            web.post("/v1/tokenize", self.tokenize),
            web.post("/tokenize", self.tokenize),
            web.post("/v1/detokenize", self.detokenize),
            web.post("/update_weight_version", self.update_weight_version),
            web.get("/server_info", self.server_info),
            web.get("/get_server_info", self.server_info),
            web.get("/model_info", self.model_info),
            web.get("/get_model_info", self.model_info),
            web.get("/metrics", self.metrics),
        ]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/chat/completions`."""
        engine = self._engine
        body = await read_body(request)
        flags = read_flags(body, request.headers, engine.options)
        chat = read_sglang_chat(body, flags)
        common = read_shared(body, engine.options)
        if flags.input_ids is not None:
            engine.model.check_ids(flags.input_ids)
        prompt = chat_prompt(chat, common, engine.model, engine.options, ids=flags.input_ids, room_for=sglang_room)
        behind = self._behind(flags.rid)
        head = engine.head(behind.id, common)
        scoring = self._scoring(common)
        reply = SglangChatReply(chat, common, flags, engine.options, head, prompt, scoring, behind, self._new_call_id)
        return await engine.answer(request, common, reply, behind.versions)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/completions`."""
        engine = self._engine
        body = await read_body(request)
        flags = read_flags(body, request.headers, engine.options)
        completions, common = read_completions(body), read_shared(body, engine.options)
        prompts = text_prompts(completions, common, engine.model, engine.options, sglang_room)
        behind = self._behind(flags.rid)
        head = engine.head(behind.id, common)
        reply = SglangCompletionsReply(completions, common, flags, head, prompts, self._scoring(common), behind)
        return await engine.answer(request, common, reply, behind.versions)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """`POST /generate`: its refusals have a shape of their own."""
        engine = self._engine
        try:
            asked, common = read_native(await read_body(request), engine.options)
            prompts = native_prompts(asked, common, engine.model, engine.options)
        except RefusedError as refusal:
            unread = refusal.kind == "Bad Request"
            return as_json({"error": str(refusal) if unread else {"message": str(refusal)}}, refusal.status)
        behind = self._behind(asked.rid)
        reply = NativeReply(asked, common, engine.model, engine.options, prompts, self._scoring(common), behind)
        return await engine.answer(request, common, reply, behind.versions, scores_prompt=bool(asked.return_logprob))

    async def tokenize(self, request: web.Request) -> web.Response:
        """`POST /v1/tokenize`: the ids of a prompt or of rendered messages."""
        ids = self._engine.model.tokenizer.encode(text_to_tokenize(await read_body(request), prepare_for_sglang))
        return as_json({"tokens": ids, "count": len(ids), "max_model_len": self._engine.options.max_model_len})

    async def update_weight_version(self, request: web.Request) -> web.Response:
        """`POST /update_weight_version`: another label from now on; ends the calls in flight unless told not to."""
        body = await read_body(request)
        version = new_version(body)
        self._engine.weights.version = version
        if body.get("abort_all_requests", True):
            self._engine.weights.aborts += 1
        return as_json({"success": True, "message": f"Weight version updated to {version}", "new_version": version})

    async def server_info(self, request: web.Request) -> web.Response:
        """`GET /server_info`: says honestly that this is no SGLang."""
        options = self._engine.options
        told = {"model_path": options.model, "context_length": options.max_model_len}
        return as_json({**told, **self._parsers, "version": VERSION})

    async def model_info(self, request: web.Request) -> web.Response:
        """`GET /model_info`."""
        told = {
            "model_path": self._engine.options.model,
            "tokenizer_path": self._engine.options.model,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": self._engine.weights.version,
        }
        return as_json({**told, **self._parsers})

    async def metrics(self, request: web.Request) -> web.Response:
        """`GET /metrics`: the one gauge that tells whether a call was aborted."""
        labels = f'model_name="{self._engine.options.model}"'
        return as_gauge("sglang:num_running_reqs", labels, "The number of running requests.", self._engine.running)

    @property
    def _parsers(self) -> dict[str, str | None]:
        """The parsers that `parser` behaves like, if there are any."""
        has = self._engine.options.has_parser
        return {"reasoning_parser": "qwen3" if has else None, "tool_call_parser": "qwen25" if has else None}

    def _behind(self, rid: str | None) -> Behind:
        return Behind(rid or self._engine.new_hex() + self._engine.new_hex(), Versions(), self._engine.weights)

    def _scoring(self, common: Common) -> Scoring:
        return Scoring(self._engine.model.tokenizer, 1.0 if common.temperature is None else common.temperature)

    def _new_call_id(self) -> str:
        return f"call_{self._engine.clock.entropy(12).hex()}"
