"""The protocols clients speak, one file each. A dialect says what a client asked to see, and how errors look to it."""

from proxy.dialects.base import Asked, Dialect
from proxy.dialects.chat import Chat
from proxy.dialects.completions import Completions
from proxy.dialects.generate import Generate

__all__ = ["DIALECTS", "Asked", "Dialect"]

# By route. A new dialect is one file and one line here.
DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": Chat(),
    "/v1/completions": Completions(),
    "/inference/v1/generate": Generate(),
}
