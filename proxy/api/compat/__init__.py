"""Protocols of other systems, served with TokenTape's recording, and the endpoints that sample in them."""

from collections.abc import Mapping
from typing import Final

from proxy.api.compat.atropos_generate import (
    COMPLETIONS,
    GENERATE,
    TRL_GENERATE,
    read_generate,
    read_trl_generate,
)
from proxy.api.compat.osmosis import read_flat
from proxy.api.model.routes import CallRoute
from proxy.protocols.dialects import DIALECTS, METHODS, TRANSLATORS
from proxy.protocols.plan import read_translated_call

# The endpoints that sample, in all dialects and in other systems' formats, each with its adapter.
CALL_ROUTES: Final[Mapping[str, CallRoute]] = {
    **{path: CallRoute(dialect) for path, dialect in DIALECTS.items()},
    **{path: CallRoute(translation, read_translated_call) for path, translation in (TRANSLATORS | METHODS).items()},
    COMPLETIONS: CallRoute(DIALECTS[COMPLETIONS], read_flat),
    GENERATE: CallRoute(DIALECTS[GENERATE], read_generate),
    TRL_GENERATE: CallRoute(DIALECTS[COMPLETIONS], read_trl_generate),
}
