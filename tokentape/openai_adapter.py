"""ManagedServerAdapter: a ManagedServer with the methods of an OpenAI client, for code that was written against one."""

from typing import TYPE_CHECKING, Any, Final, NoReturn

from tokentape.managed_server import ManagedServer

if TYPE_CHECKING:
    from openai.types import Completion
    from openai.types.chat import ChatCompletion

_NOT_SUPPORTED: Final = (
    "ManagedServerAdapter supports chat.completions.create and completions.create; for {}, call the proxy directly"
)


class ManagedServerAdapter:
    """`chat.completions.create` and `completions.create` of a ManagedServer. `base_url` is an attribute only."""

    def __init__(self, managed_server: ManagedServer, base_url: str) -> None:
        self.managed_server = managed_server
        self.base_url = base_url
        self.chat = _Chat(managed_server)
        self.completions = _Completions(managed_server)

    async def post(self, *_: Any, **__: Any) -> NoReturn:
        """Not supported: raises NotImplementedError."""
        raise NotImplementedError(_NOT_SUPPORTED.format("post"))

    def copy(self, **_: Any) -> NoReturn:
        """Not supported: raises NotImplementedError."""
        raise NotImplementedError(_NOT_SUPPORTED.format("copy"))


class _Chat:
    def __init__(self, managed_server: ManagedServer) -> None:
        self.completions = _ChatCompletions(managed_server)


class _ChatCompletions:
    def __init__(self, managed_server: ManagedServer) -> None:
        self._managed_server = managed_server

    async def create(self, **body: Any) -> "ChatCompletion":
        return await self._managed_server.chat_completion(**body)


class _Completions:
    def __init__(self, managed_server: ManagedServer) -> None:
        self._managed_server = managed_server

    async def create(self, **body: Any) -> "Completion":
        return await self._managed_server.completion(**body)
