"""The meeting of an engine: what it is, found out by a few harmless questions.

Holds the order of the questions and what becomes known. How they are sent is given; how answers are read is `recognition`'s.
"""

import asyncio
from collections.abc import Awaitable, Callable

from proxy.engines.recognition import QUESTIONS, Seen, recognise
from proxy.errors import EngineFault
from proxy.logs import LOG
from proxy.upstream.endpoint import Endpoint


async def meet(endpoint: Endpoint, ask: Callable[[Endpoint, str], Awaitable[Seen]]) -> None:
    """Ask the questions, first those that only one kind of engine answers. An engine that is away stays what it was."""
    try:
        *theirs, common = QUESTIONS
        answers = dict(zip(theirs, await asyncio.gather(*(ask(endpoint, path) for path in theirs)), strict=True))
        traits = recognise(answers)
        if traits.kind == "plain":
            answers[common] = await ask(endpoint, common)
            traits = recognise(answers)
    except EngineFault as fault:
        endpoint.last_fault = fault.message
        return
    finally:
        endpoint.asking = None
    if endpoint.settings.kind not in {"auto", traits.kind}:
        LOG.warning("%s is configured as %s and looks like %s", endpoint.settings.label, endpoint.kind, traits.kind)
    is_loading = traits.kind == "plain" and any(seen.status == 503 for seen in answers.values())
    endpoint.traits, endpoint.is_known = traits, not is_loading
