"""ManagedServer with the face of an OpenAI client, for code that was written against one."""

from typing import Any, Final, NoReturn

from openai.types import Completion
from openai.types.chat import ChatCompletion

from proxy.client.managed import ManagedServer

_MISSING: Final = (
    "ManagedServerAdapter has chat.completions.create and completions.create; for {}, call the proxy itself"
)


class ManagedServerAdapter:
    """`chat.completions.create` and `completions.create` of a ManagedServer. `base_url` is only told."""

    def __init__(self, managed_server: ManagedServer, base_url: str) -> None:
        self.managed_server = managed_server
        self.base_url = base_url
        self.chat = _Chat(managed_server)
        self.completions = _Completions(managed_server)

    async def post(self, *_: Any, **__: Any) -> NoReturn:
        """Not there."""
        raise NotImplementedError(_MISSING.format("post"))

    def copy(self, **_: Any) -> NoReturn:
        """Not there."""
        raise NotImplementedError(_MISSING.format("copy"))


class _Chat:
    def __init__(self, managed_server: ManagedServer) -> None:
        self.completions = _ChatCompletions(managed_server)


class _ChatCompletions:
    def __init__(self, managed_server: ManagedServer) -> None:
        self._managed_server = managed_server

    async def create(self, **body: Any) -> ChatCompletion:
        return await self._managed_server.chat_completion(**body)


class _Completions:
    def __init__(self, managed_server: ManagedServer) -> None:
        self._managed_server = managed_server

    async def create(self, **body: Any) -> Completion:
        return await self._managed_server.completion(**body)
