"""Keys that are missing, weak, or good for what they should not be.

Holds the looking at configured keys. No finding has a key in it: each is named by its place.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from proxy.api.api_keys import MINTED_PREFIX, read_minted
from proxy.cli.check.finding import Finding
from proxy.config.addresses import is_loopback, split_listen
from proxy.config.settings import Settings

_SHORTEST: Final = 16  # characters; 64 bits, if each is a hexadecimal digit that nobody chose
_FEWEST: Final = 6  # different characters
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
_MAKE: Final = 'python3 -c "import secrets; print(secrets.token_urlsafe(32))" makes a good one'


def check_keys(settings: Settings) -> Iterator[Finding]:
    """The keys of both APIs, together and each for itself."""
    agents = [key.get_secret_value() for key in settings.agents.api_keys]
    control = [key.get_secret_value() for key in settings.control.api_keys]
    listens = {"agents": settings.listen, "control": settings.control.listen or settings.listen}
    if settings.insecure:
        yield from _missing({"agents": agents, "control": control}, listens)
    if set(agents) & set(control):
        mend = "give the control API keys of its own: with these, every agent may read and delete all rollouts"
        yield Finding("keys", "fault", "a key is in both agents.api_keys and control.api_keys", mend)
    for section, keys in (("agents", agents), ("control", control)):
        is_public = not is_loopback(split_listen(listens[section])[0])
        yield from _each(section, keys, is_public=is_public)


def _missing(keys: dict[str, list[str]], listens: dict[str, str]) -> Iterator[Finding]:
    """APIs without keys that other machines can reach (`--insecure`; without it the settings are refused)."""
    bare = [
        section for section, given in keys.items() if not given and not is_loopback(split_listen(listens[section])[0])
    ]
    if bare:
        names = " and ".join(f"{section}.api_keys" for section in bare)
        seen = f"{listens[bare[0]]} is open to all who reach it: {names} {'are' if len(bare) > 1 else 'is'} empty"
        yield Finding("keys", "note", seen, f"set {names}, or make sure that the network is closed")


def _each(section: str, keys: Sequence[str], *, is_public: bool) -> Iterator[Finding]:
    for place, key in enumerate(keys):
        name = f"{section}.api_keys[{place}]"
        if key in keys[:place]:
            yield Finding(
                "keys", "note", f"{name} is there twice", "leave one out: a key that is taken away must be gone"
            )
        elif read_minted(key) is not None:
            seen = f"{name} looks like the key of a rollout ({MINTED_PREFIX}…), and is taken for one"
            yield Finding("keys", "fault", seen, f"use a key that does not begin with {MINTED_PREFIX}")
        elif _is_weak(key):
            seen = f"{name} can be guessed: it is short, of few characters, or a common one"
            yield Finding("keys", "fault" if is_public else "note", seen, _MAKE)


def _is_weak(key: str) -> bool:
    has_common = len(key) < 2 * _SHORTEST and any(word in key.lower() for word in _COMMON)
    return len(key) < _SHORTEST or len(set(key)) < _FEWEST or has_common
