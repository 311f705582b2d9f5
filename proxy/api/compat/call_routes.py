"""The endpoints that sample, in all dialects and in other systems' shapes, each with its adapters."""

from collections.abc import Mapping
from typing import Final

from proxy.api.adapters import CallRoute
from proxy.api.compat.atropos.generate import COMPLETIONS, GENERATE, read_generate
from proxy.api.compat.osmosis.flat_call import read_flat
from proxy.protocols.dialects import DIALECTS, TRANSLATIONS
from proxy.protocols.translated_call import read_by_chat

CALL_ROUTES: Final[Mapping[str, CallRoute]] = {
    **{path: CallRoute(dialect) for path, dialect in DIALECTS.items()},
    **{path: CallRoute(translation, (read_by_chat,)) for path, translation in TRANSLATIONS.items()},
    COMPLETIONS: CallRoute(DIALECTS[COMPLETIONS], (read_flat,)),
    GENERATE: CallRoute(DIALECTS[COMPLETIONS], (read_generate,)),
}
