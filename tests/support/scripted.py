"""An engine in vLLM's shapes with scripted texts, and its tokenizer, where each word is a token."""

import re
from typing import Any

from aiohttp import web
from tests.support.fakes import FakeEngine

BOS, EOS = "<s>", "</s>"
_WORDS = re.compile(r"<[^<>]*>|\s*[^\s<]+|\s+")


class Words:
    """A tokenizer with transformers' interface; ids are assigned in the order in which words are first seen."""

    bos_token = BOS

    def __init__(self) -> None:
        self.ids = {BOS: 1, EOS: 2}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        words = [self.ids.setdefault(word, len(self.ids) + 1) for word in _WORDS.findall(text)]
        return [1, *words] if add_special_tokens else words

    def decode(self, ids, skip_special_tokens: bool = False) -> str:
        words = {token: word for word, token in self.ids.items()}
        return "".join(words[token] for token in ids if not (skip_special_tokens and token in (1, 2)))

    def apply_chat_template(self, messages, tools=None, tokenize=False, add_generation_prompt=True) -> str:
        assert not tokenize
        prefix = f"<tools {len(tools)}>" if tools else ""
        turns = "".join(f"<{message['role']}>{message['content']}{EOS}" for message in messages)
        return BOS + prefix + turns + ("<assistant>" if add_generation_prompt else "")


class ScriptedEngine:
    """Answer with `texts`, one a choice, each with an EOS if `finish_reason` is stop; a test sets omissions."""

    def __init__(self, engine: FakeEngine) -> None:
        self.words = Words()
        self.texts: list[str] = []
        self.finish_reason = "stop"
        self.returns_ids = True
        self.message: dict[str, Any] = {}
        self.logprobs_short_by = 0
        engine.respond = self.respond

    def replies(self, *texts: str, finish_reason: str = "stop") -> None:
        """Set the texts, and an end after them."""
        self.texts, self.finish_reason = list(texts), finish_reason

    async def respond(self, request: web.Request, body: dict) -> web.StreamResponse:
        if request.method == "GET":
            return web.json_response({"detail": "Not Found"}, status=404)
        is_chat = request.path.endswith("/chat/completions")
        prompt = self._prompt(body, is_chat)
        self.sampled: list[list[int]] = []
        choices = [self._choice(index, is_chat, prompt) for index in range(body.get("n") or 1)]
        head = {
            "id": "x",
            "created": 1,
            "model": body.get("model", "policy"),
            "object": "chat.completion" if is_chat else "text_completion",
        }
        ids = {"prompt_token_ids": prompt} if is_chat and self.returns_ids else {}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": sum(map(len, self.sampled))}
        return web.json_response({**head, "choices": choices, **ids, "usage": usage})

    def _prompt(self, body: dict, is_chat: bool) -> list[int]:
        if is_chat:
            return self.words.encode(self.words.apply_chat_template(body["messages"]), add_special_tokens=False)
        if isinstance(body["prompt"], list):
            return body["prompt"]
        return self.words.encode(body["prompt"], body.get("add_special_tokens", True))

    def _choice(self, index: int, is_chat: bool, prompt: list[int]) -> dict:
        text = self.texts.pop(0)
        ids = self.words.encode(text + (EOS if self.finish_reason == "stop" else ""), add_special_tokens=False)
        self.sampled.append(ids)
        logprobs = [-token / 8 for token in ids][self.logprobs_short_by :]
        choice = {"index": index, "finish_reason": self.finish_reason}
        if is_chat:
            choice["message"] = {"role": "assistant", "content": text, **self.message}
            result = {
                "content": [
                    {"token": "t", "logprob": logprob, "bytes": None, "top_logprobs": []} for logprob in logprobs
                ]
            }
        else:
            choice["text"] = text
            result = {
                "tokens": ["t"] * len(logprobs),
                "token_logprobs": logprobs,
                "top_logprobs": None,
                "text_offset": [],
            }
        if not self.returns_ids:
            return choice
        of_prompt = {} if is_chat else {"prompt_token_ids": prompt}
        return {**choice, "token_ids": ids, "logprobs": result, **of_prompt}
