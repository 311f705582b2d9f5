"""What people say about a store: its URL and its options.

Holds `StoreOptions`, `Address` and the reading of a URL into one. It must not connect, start or open anything, and
reads no environment: secrets come in with the options.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal
from urllib.parse import unquote

Durability = Literal["acknowledged", "fsync", "replicated"]
Kind = Literal["embedded", "unix", "single", "cluster"]

_KNOWN_FORMS: Final = (
    "embedded:PATH, unix:PATH, redis://[USER:PASSWORD@]HOST[:PORT][/DB], rediss://… (TLS), "
    "redis+cluster://HOST[:PORT][,HOST[:PORT]…] and rediss+cluster://…"
)
_SCHEMES: Final[dict[str, tuple[Kind, bool]]] = {
    "redis": ("single", False),
    "rediss": ("single", True),
    "redis+cluster": ("cluster", False),
    "rediss+cluster": ("cluster", True),
}
_PATH_SCHEMES: Final[dict[str, Kind]] = {"embedded": "embedded", "unix": "unix"}
_DEFAULT_PORT: Final = 6379


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How to use a store.

    `ttl_s`: rollouts that nothing is written to for so long vanish; None: never. `durability`: when a write counts as
    done: at the server's reply, on its disk, or on `replicas` replicas. `timeout_s` bounds every wait for the store.
    `username`, `password` win over those in the URL. `ca_file` is for TLS; None: the system's authorities.
    `max_connections` are kept to each server; more callers wait for a free one.
    """

    prefix: str = "tt"
    ttl_s: int | None = None
    durability: Durability = "acknowledged"
    replicas: int = 1
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    ca_file: Path | None = None
    timeout_s: float = 10.0
    max_connections: int = 64

    def __post_init__(self) -> None:
        if not self.prefix or "{" in self.prefix or "}" in self.prefix:
            raise ValueError(
                f"the prefix {self.prefix!r} must not be empty or hold braces: they mark a cluster's slots"
            )
        for name in ("ttl_s", "replicas", "timeout_s", "max_connections"):
            number = getattr(self, name)
            if number is not None and number <= 0:
                raise ValueError(f"{name} must be more than 0, not {number}")


@dataclass(frozen=True, slots=True)
class Address:
    """A store's URL, taken apart. `path` is of an embedded store or a unix socket, `hosts` of all others."""

    kind: Kind
    path: Path = Path()
    hosts: tuple[tuple[str, int], ...] = ()
    tls: bool = False
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)


def read_url(url: str) -> Address:
    """The address that a URL names. Raises `ValueError` saying what is wrong with it, without its password."""
    scheme, _, rest = url.partition(":")
    if scheme in _PATH_SCHEMES:
        if not rest:
            raise ValueError(f"{scheme}: needs a path, as in {scheme}:./data")
        return Address(_PATH_SCHEMES[scheme], path=Path(rest).expanduser())
    if scheme not in _SCHEMES or not rest.startswith("//"):
        raise ValueError(f"a store's URL cannot begin with {scheme!r}; known forms are {_KNOWN_FORMS}")
    kind, tls = _SCHEMES[scheme]
    credentials, _, where = rest[2:].rpartition("@")
    username, _, password = credentials.partition(":")
    where, _, db = where.partition("/")
    if db and (kind == "cluster" or not db.isdecimal()):
        raise ValueError(f"/{db} cannot stand in a store's URL: a database is a number, and a cluster has none")
    return Address(
        kind,
        hosts=_read_hosts(kind, where),
        tls=tls,
        db=int(db or 0),
        username=unquote(username) or None,
        password=unquote(password) or None,
    )


def _read_hosts(kind: Kind, where: str) -> tuple[tuple[str, int], ...]:
    """The hosts of a URL. An IPv6 address stands in brackets."""
    hosts = []
    for part in where.split(","):
        head, bracket, tail = part.rpartition("]")
        host, colon, port = tail.partition(":")
        host = head.removeprefix("[") if bracket else host
        if not host or (colon and not (port.isdecimal() and 0 < int(port) < 65_536)):
            raise ValueError(f"{part!r} is not HOST or HOST:PORT; known forms of a store's URL are {_KNOWN_FORMS}")
        hosts.append((host, int(port) if colon else _DEFAULT_PORT))
    if kind == "single" and len(hosts) > 1:
        raise ValueError(f"{where!r} names several hosts; for a cluster, write redis+cluster://{where}")
    return tuple(hosts)
