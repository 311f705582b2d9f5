"""Durable storage of names, bytes and counts on Redis or Valkey; imports nothing of `proxy`.

    types      the values that the store takes and returns
    errors     the errors
    options    options of a store, and its URL
    redis/     the store
    embedded/  the bundled valkey-server
    opening    open_store and start_shared

Each module imports only modules above it; `redis/` and `embedded/` do not import each other.
"""

from typing import TYPE_CHECKING, Any

from storage.options import StoreOptions

if TYPE_CHECKING:
    from storage.opening import open_store, start_shared

__all__ = ["StoreOptions", "open_store", "start_shared"]


def __getattr__(name: str) -> Any:
    """Import what opens a store when it is first used: who only reads values or errors does not need the client."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from storage import opening  # noqa: PLC0415

    return getattr(opening, name)
