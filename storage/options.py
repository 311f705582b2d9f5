"""The options of a store, and the parsing of its URL. Environment variables are not read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal
from urllib.parse import unquote

Durability = Literal["acknowledged", "fsync", "replicated"]
Kind = Literal["embedded", "unix", "single", "cluster", "sentinel"]

_VALID_FORMS: Final = (
    "embedded:PATH, unix:PATH, redis://[USER:PASSWORD@]HOST[:PORT][/DB], rediss://… (TLS), "
    "redis+cluster://HOST[:PORT][,HOST[:PORT]…], rediss+cluster://…, redis+sentinel://HOST[:PORT][,HOST[:PORT]…]/SERVICE[/DB] "
    "and rediss+sentinel://…"
)
_SCHEMES: Final[dict[str, tuple[Kind, bool]]] = {
    "redis": ("single", False),
    "rediss": ("single", True),
    "redis+cluster": ("cluster", False),
    "rediss+cluster": ("cluster", True),
    "redis+sentinel": ("sentinel", False),
    "rediss+sentinel": ("sentinel", True),
}
_PATH_SCHEMES: Final[dict[str, Kind]] = {"embedded": "embedded", "unix": "unix"}
_DEFAULT_PORT: Final = 6379
_SENTINEL_PORT: Final = 26_379
MIN_BUCKETS: Final = 16
MAX_BUCKETS: Final = 1024


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Options of a store.

    `ttl_s`: lifetime of a rollout after its last write; None: no expiry. `durability`: a write is complete when the server
    has replied (`acknowledged`), when it is on the server's disk (`fsync`), or when it is on `replicas` replicas
    (`replicated`). `timeout_s` limits every wait for the store. `username` and `password` override those in the URL;
    `sentinel_username` and `sentinel_password` are those of the sentinels.
    `ca_file`: certificate authorities for TLS; None: the system's. `max_connections`: connections per server; callers
    wait for a free connection when all are in use. `buckets`: into how many parts, each in one slot of a cluster, a store that
    is created divides its keys: a power of two; None: 16 on one server, 256 on a cluster. A store that exists keeps its number.
    `indexed`: fields by which rollouts are listed, each with the value of a rollout without it (empty: it is not listed). The
    first one must have a value. All processes that write to a store must index the same fields.
    """

    prefix: str = "tt"
    ttl_s: int | None = None
    durability: Durability = "acknowledged"
    replicas: int = 1
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    sentinel_username: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)
    ca_file: Path | None = None
    timeout_s: float = 10.0
    max_connections: int = 64
    buckets: int | None = None
    indexed: Mapping[str, bytes] = field(default_factory=lambda: {"status": b'"open"', "policy": b""})

    def __post_init__(self) -> None:
        if not self.prefix or "{" in self.prefix or "}" in self.prefix:
            raise ValueError(
                f"the prefix {self.prefix!r} must not be empty or contain braces, which determine the cluster slot"
            )
        for name in ("ttl_s", "replicas", "timeout_s", "max_connections"):
            number = getattr(self, name)
            if number is not None and number <= 0:
                raise ValueError(f"{name} must be greater than 0, not {number}")
        if self.buckets is not None and not are_buckets(self.buckets):
            raise ValueError(f"buckets must be a power of two from {MIN_BUCKETS} to {MAX_BUCKETS}, not {self.buckets}")


def are_buckets(count: int) -> bool:
    """Return whether a store can have this number of buckets."""
    return MIN_BUCKETS <= count <= MAX_BUCKETS and count.bit_count() == 1


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed store URL. `path` is set for embedded stores and Unix sockets, `hosts` for all others.

    `service`: the name under which the sentinels at `hosts` monitor the primary.
    """

    kind: Kind
    path: Path = Path()
    hosts: tuple[tuple[str, int], ...] = ()
    tls: bool = False
    db: int = 0
    service: str = ""
    username: str | None = None
    password: str | None = field(default=None, repr=False)


def parse_url(url: str) -> Address:
    """Parse a store URL. Raises `ValueError` for an invalid URL; the message does not contain the password."""
    scheme, _, rest = url.partition(":")
    if scheme in _PATH_SCHEMES:
        if not rest:
            raise ValueError(f"{scheme}: needs a path, as in {scheme}:./data")
        return Address(_PATH_SCHEMES[scheme], path=Path(rest).expanduser())
    if scheme not in _SCHEMES or not rest.startswith("//"):
        raise ValueError(f"a store URL cannot start with {scheme!r}; valid forms are {_VALID_FORMS}")
    kind, tls = _SCHEMES[scheme]
    credentials, _, netloc = rest[2:].rpartition("@")
    username, _, password = credentials.partition(":")
    netloc, _, db = netloc.partition("/")
    service = ""
    if kind == "sentinel":
        service, _, db = db.partition("/")
        if not service:
            raise ValueError(f"the store URL lacks the name of the primary: {scheme}://{netloc}/SERVICE")
    if db and (kind == "cluster" or not db.isdecimal()):
        raise ValueError(f"invalid database /{db} in the store URL: a database is a number, and a cluster has none")
    return Address(
        kind,
        hosts=_parse_hosts(kind, netloc),
        tls=tls,
        db=int(db or 0),
        service=unquote(service),
        username=unquote(username) or None,
        password=unquote(password) or None,
    )


def _parse_hosts(kind: Kind, netloc: str) -> tuple[tuple[str, int], ...]:
    """Parse the hosts of a URL. IPv6 addresses are in brackets."""
    hosts = []
    for part in netloc.split(","):
        head, bracket, tail = part.rpartition("]")
        host, colon, port = tail.partition(":")
        host = head.removeprefix("[") if bracket else host
        if not host or (colon and not (port.isdecimal() and 0 < int(port) < 65_536)):
            raise ValueError(f"{part!r} is not HOST or HOST:PORT; valid forms of a store URL are {_VALID_FORMS}")
        default_port = _SENTINEL_PORT if kind == "sentinel" else _DEFAULT_PORT
        hosts.append((host, int(port) if colon else default_port))
    if kind == "single" and len(hosts) > 1:
        raise ValueError(f"{netloc!r} has more than one host; for a cluster, use redis+cluster://{netloc}")
    return tuple(hosts)
