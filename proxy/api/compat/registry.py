"""The adapters of other systems' call shapes, by endpoint and body."""

from collections.abc import Mapping
from typing import Any, Final

from proxy.api.adapters import Form
from proxy.api.compat.atropos.generate import COMPLETIONS, GENERATE, read_generate
from proxy.api.compat.osmosis.flat_call import read_flat
from proxy.protocols.dialects import DIALECTS, TRANSLATIONS, Dialect
from proxy.protocols.dialects.translation import Translation, Ways
from proxy.protocols.translated_call import read_by_chat

_SENT_TO: Final = {GENERATE: COMPLETIONS}  # paths of our own that no engine is asked at


def read_form(endpoint: str, body: Mapping[str, Any], ways: Ways) -> Form | None:
    """The form that a call has; None if it is what it looks like. Raises NotValid."""
    if endpoint == GENERATE:
        return read_generate(body)
    return read_by_chat(endpoint, body, ways) or read_flat(endpoint, body)


def dialect_of(endpoint: str) -> Dialect | Translation | None:
    """The dialect that a path is served in, the forms' own paths among them."""
    return TRANSLATIONS.get(endpoint) or DIALECTS.get(_SENT_TO.get(endpoint, endpoint))
