"""Aliases that name nothing, and tokenizers that cannot be loaded.

Holds the looking at `models` and at endpoints' tokenizers.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence

from proxy.cli.check.finding import Finding
from proxy.config.sections import EndpointSettings
from proxy.errors import NotValid
from proxy.upstream.tokenizers import load


def check_aliases(models: Mapping[str, str], listed: Mapping[str, Sequence[str]]) -> Iterator[Finding]:
    """Whether the engines serve what `models` sends calls to. `listed`: the models of each engine that told them."""
    every = sorted({name for names in listed.values() for name in names})
    for asked, served in models.items():
        without = [label for label, names in listed.items() if served not in names]
        subject = f"models {asked!r}"
        if not every:
            continue  # no engine answered, which was told
        if len(without) == len(listed):
            mend = f"the engines list {', '.join(every)}: name one of them, or serve it (--served-model-name)"
            yield Finding(subject, "fault", f"it stands for {served!r}, which no engine lists", mend)
        elif without:
            seen = f"it stands for {served!r}, which is not listed by {', '.join(without)}"
            yield Finding(
                subject, "note", seen, "calls that go there get 404: serve it everywhere, or leave the engine out"
            )
        else:
            yield Finding(subject, "ok", f"it stands for {served!r}")


async def check_tokenizer(endpoint: EndpointSettings) -> Finding:
    """Whether the tokenizer of an endpoint loads, as its first use will need it."""
    subject = f"tokenizer {endpoint.tokenizer}"
    try:
        await asyncio.to_thread(load, endpoint.tokenizer or "")
    except NotValid as error:
        mend = "name a folder with tokenizer.json, or a name on the hub that this machine reaches"
        return Finding(subject, "fault", error.message, "" if "pip install" in error.message else mend)
    return Finding(subject, "ok", f"it loads, for {endpoint.label}")
