"""The supported client protocols, one module or package each: what a client requests, and the format of its errors."""

from proxy.protocols.dialects.base import Dialect, Translator
from proxy.protocols.dialects.gemini import GEMINI, GEMINI_ARRAY, GENERATE, STREAM, STREAM_ARRAY
from proxy.protocols.dialects.generate import Generate, SglangGenerate
from proxy.protocols.dialects.messages import MESSAGES
from proxy.protocols.dialects.openai import Chat, Completions
from proxy.protocols.dialects.responses import RESPONSES

# By route. Adding a dialect takes one file and one line here.
DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": Chat(),
    "/v1/completions": Completions(),
    "/inference/v1/generate": Generate(),
    "/generate": SglangGenerate(),
}

# Dialects that are translated to chat, by route. Adding one takes one package and one line here.
TRANSLATORS: dict[str, Translator] = {
    "/v1/messages": MESSAGES,
    "/v1/responses": RESPONSES,
}

# The same by method, where the route has the name of a model before the method.
METHODS: dict[str, Translator] = {GENERATE: GEMINI, STREAM: GEMINI, STREAM_ARRAY: GEMINI_ARRAY}
