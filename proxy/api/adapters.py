"""The endpoints that sample, and how the adapter of a call in another format is found."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from proxy.protocols.dialects.base import ErrorDialect
from proxy.protocols.dialects.translation import TranslationOptions
from proxy.protocols.translated_call import CallAdapter
from proxy.trajectory.step import Step


def adapter_of(adapter: CallAdapter | None, step: Step) -> CallAdapter | None:
    """Return the adapter if it was applied to the call of a step."""
    return None if adapter is None or step.endpoint in adapter.own.values() else adapter


# Reads the body of a call to an endpoint; None if the body has the endpoint's own shape. Raises UnprocessableRequest.
ReadAdapter: TypeAlias = Callable[[str, Mapping[str, Any], TranslationOptions], CallAdapter | None]


@dataclass(frozen=True, slots=True)
class CallRoute:
    """An endpoint that samples: the dialect of its errors, and its adapters, which are tried in order."""

    errors: ErrorDialect
    adapters: tuple[ReadAdapter, ...] = ()

    def read(self, endpoint: str, body: Mapping[str, Any], options: TranslationOptions) -> CallAdapter | None:
        """Return the adapter of a body; None if the body has the endpoint's own format. Raises UnprocessableRequest."""
        for read in self.adapters:
            if (adapter := read(endpoint, body, options)) is not None:
                return adapter
        return None
