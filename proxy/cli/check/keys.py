"""Checks API keys: missing, weak, duplicate, or valid for both APIs.

Findings never contain a key; they name it by its position in the list.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from proxy.api.api_keys import MINTED_PREFIX, read_minted
from proxy.cli.check.finding import Finding
from proxy.config.addresses import is_loopback, split_listen
from proxy.config.settings import Settings

MIN_LENGTH: Final = 16  # characters; 64 bits if they are random hexadecimal digits
MIN_DISTINCT: Final = 6  # characters
_COMMON: Final = (
    "changeme",
    "change-me",
    "secret",
    "password",
    "example",
    "your-key",
    "your_key",
    "test-key",
    "a-key",
    "12345",
)
_GENERATE: Final = 'generate one with python3 -c "import secrets; print(secrets.token_urlsafe(32))"'


def check_keys(settings: Settings) -> Iterator[Finding]:
    """Check the keys of both APIs."""
    agents = [key.get_secret_value() for key in settings.agents.api_keys]
    control = [key.get_secret_value() for key in settings.control.api_keys]
    listens = {"agents": settings.listen, "control": settings.control.listen or settings.listen}
    if settings.insecure:
        yield from _missing({"agents": agents, "control": control}, listens)
    if agents and not control and is_loopback(split_listen(listens["control"])[0]):
        seen = (
            f"the control API at {listens['control']} requires no key, and agents have keys (control.api_keys is empty)"
        )
        fix = "set control.api_keys: an agent on this machine could set its reward, and read and delete all rollouts"
        yield Finding("keys", "note", seen, fix)
    if set(agents) & set(control):
        fix = "use separate keys for the control API; with this one, every agent can read and delete all rollouts"
        yield Finding("keys", "fault", "a key is in both agents.api_keys and control.api_keys", fix)
    for section, keys in (("agents", agents), ("control", control)):
        is_public = not is_loopback(split_listen(listens[section])[0])
        yield from _section(section, keys, is_public=is_public)


def _missing(keys: dict[str, list[str]], listens: dict[str, str]) -> Iterator[Finding]:
    """Check for APIs without keys that other machines can reach. Only `--insecure` allows them."""
    bare = [
        section
        for section, configured in keys.items()
        if not configured and not is_loopback(split_listen(listens[section])[0])
    ]
    if bare:
        names = " and ".join(f"{section}.api_keys" for section in bare)
        seen = f"{listens[bare[0]]} requires no key: {names} {'are' if len(bare) > 1 else 'is'} empty"
        yield Finding("keys", "note", seen, f"set {names}, or restrict network access")


def _section(section: str, keys: Sequence[str], *, is_public: bool) -> Iterator[Finding]:
    for index, key in enumerate(keys):
        name = f"{section}.api_keys[{index}]"
        if key in keys[:index]:
            fix = "remove the duplicate, so that removing the key revokes it"
            yield Finding("keys", "note", f"{name} is a duplicate", fix)
        elif read_minted(key) is not None:
            seen = f"{name} has the prefix of rollout keys ({MINTED_PREFIX}…) and is treated as one"
            yield Finding("keys", "fault", seen, f"use a key that does not start with {MINTED_PREFIX}")
        elif _is_weak(key):
            seen = f"{name} is weak: it is short, repetitive or common"
            yield Finding("keys", "fault" if is_public else "note", seen, _GENERATE)


def _is_weak(key: str) -> bool:
    has_common = len(key) < 2 * MIN_LENGTH and any(word in key.lower() for word in _COMMON)
    return len(key) < MIN_LENGTH or len(set(key)) < MIN_DISTINCT or has_common
