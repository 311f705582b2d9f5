"""Checks the model aliases in `models` and the tokenizers of endpoints."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence

from proxy.cli.check.finding import Finding
from proxy.config.engines import EndpointSettings
from proxy.errors import UnprocessableRequest
from proxy.upstream.tokenizers import load


def check_aliases(models: Mapping[str, str], listed: Mapping[str, Sequence[str]]) -> Iterator[Finding]:
    """Check that the engines serve the models that aliases refer to. `listed` has the models of each engine."""
    every = sorted({name for names in listed.values() for name in names})
    for alias, served in models.items():
        without = [label for label, names in listed.items() if served not in names]
        subject = f"models {alias!r}"
        if not every:
            continue  # no engine responded; other findings report it
        if len(without) == len(listed):
            fix = f"use a model that the engines list ({', '.join(every)}), or start one with --served-model-name"
            yield Finding(subject, "fault", f"refers to {served!r}, which no engine lists", fix)
        elif without:
            seen = f"refers to {served!r}, which {', '.join(without)} does not list"
            fix = "calls routed there return 404; serve the model on every engine, or remove the engine"
            yield Finding(subject, "note", seen, fix)
        else:
            yield Finding(subject, "ok", f"refers to {served!r}")


async def check_tokenizer(endpoint: EndpointSettings) -> Finding:
    """Check that the tokenizer of an endpoint loads."""
    subject = f"tokenizer {endpoint.tokenizer}"
    try:
        await asyncio.to_thread(load, endpoint.tokenizer or "")
    except UnprocessableRequest as error:
        fix = "use a folder that contains tokenizer.json, or the name of a model on the Hugging Face Hub"
        return Finding(subject, "fault", error.message, "" if "pip install" in error.message else fix)
    return Finding(subject, "ok", f"loads, for {endpoint.label}")
