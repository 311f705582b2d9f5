"""The failures we can name, and what a client is told of each.

Holds the error tree and nothing else: no formatting for a dialect (dialects do that) and no logging.

    ProxyError                  a failure we can name; never raised itself
    ├── BadCall            400  the request is not one we can read
    │   ├── Unauthorized   401  no key, or a wrong one
    │   ├── Forbidden      403  a good key, for something else
    │   ├── NotFound       404  no such route, rollout or step
    │   ├── TooSlow        408  its body did not come in time
    │   ├── Conflict       409  it stands differently already
    │   ├── RolloutClosed  409  the rollout takes no more calls
    │   ├── LeaseLost      409  the batch is held no more
    │   ├── DamagedStep    409  a stored step of the rollout cannot be read
    │   ├── TooLarge       413  a body that is too large
    │   ├── Unsupported    415  a content encoding that is not supported
    │   ├── ExpectationFailed  417  an `Expect` header that nobody knows
    │   ├── NotValid       422  readable, but a value is not allowed
    │   ├── LimitReached   429  a limit of the rollout is used up
    │   ├── Overloaded     429  calls in flight hold as many bytes as they may
    │   ├── EngineBusy     429  its engine has as many calls as it may, and enough wait
    │   └── Paused         429  calls are held while the weights change
    ├── EngineFault             the engine's fault
    │   ├── EngineBroke    502  it broke off, or answered what nobody can read
    │   │   └── EventTooLong    an event of its stream is longer than `engines.max_event_bytes`
    │   ├── EngineSilent   504  it did not answer in time
    │   └── NoEngine       503  it cannot be reached
    ├── StoreFault         503  the store cannot be reached, so the end of the turn cannot be shown
    └── InternalError      500  a defect of the proxy; its log has the traceback, under the id in the message

Agents must not learn addresses and paths: `for_agents` replaces the message of a failure that is not theirs.
"""

from typing import Self


class ProxyError(Exception):
    """A failure we can name. `status` is that of the answer; `kind` its `type`, `code` its `code`.

    `public` is the message for agents where `message` has details of the installation (addresses, paths).
    """

    status = 500
    kind = "server_error"
    code: str = "internal_error"
    public: str | None = None
    retry_after_s: int | None = None

    def __init__(self, message: str, *, param: str | None = None, public: str | None = None) -> None:
        if type(self) is ProxyError:
            raise TypeError("raise one of its kinds")
        super().__init__(message)
        self.message = message
        self.param = param
        if public is not None:
            self.public = public

    def for_agents(self, reference: str) -> Self:
        """Return the error as agents may see it. `reference` is an id under which the log has the full message."""
        return self if self.public is None else type(self)(f"{self.public} ({reference})", param=self.param)


class BadCall(ProxyError):
    """The request is not one we can read."""

    status = 400
    kind = "invalid_request_error"
    code = "bad_request"


class Unauthorized(BadCall):
    """No key, or a wrong one."""

    status = 401
    kind = "authentication_error"
    code = "invalid_api_key"


class Forbidden(BadCall):
    """A good key, for something else."""

    status = 403
    kind = "permission_error"
    code = "forbidden"


class NotFound(BadCall):
    """No such route, rollout or step."""

    status = 404
    kind = "not_found_error"
    code = "not_found"


class TooSlow(BadCall):
    """The body of the request did not come in time."""

    status = 408
    code = "request_timeout"


class Conflict(BadCall):
    """It stands differently already."""

    status = 409
    kind = "conflict_error"
    code = "conflict"


class RolloutClosed(Conflict):
    """The rollout is finished and takes no more calls."""

    kind = "rollout_closed"
    code = "rollout_closed"


class LeaseLost(Conflict):
    """A batch is no longer held by whoever claimed it."""

    kind = "lease_lost"
    code = "lease_lost"


class DamagedStep(Conflict):
    """A stored step of the rollout cannot be read. Exports of several rollouts leave the rollout out, and name it."""

    code = "damaged_step"


class TooLarge(BadCall):
    """A body of more bytes, or of more JSON values for its length, than the settings allow."""

    status = 413
    kind = "request_too_large"
    code = "request_too_large"


class Unsupported(BadCall):
    """A content encoding that is not supported; gzip, deflate, zstd and identity are."""

    status = 415
    code = "unsupported_encoding"


class ExpectationFailed(BadCall):
    """An `Expect` header other than 100-continue."""

    status = 417
    code = "expectation_failed"


class NotValid(BadCall):
    """Readable, but a value is not allowed; the message names the field."""

    status = 422
    code = "not_valid"


class LimitReached(BadCall):
    """A limit of the rollout is used up."""

    status = 429
    kind = "rollout_limit"
    code = "rollout_limit"
    retry_after_s = 60


class Overloaded(BadCall):
    """Calls in flight hold as many bytes as they may."""

    status = 429
    kind = "overloaded"
    code = "overloaded"
    retry_after_s = 1


class EngineBusy(BadCall):
    """Its engine has as many calls in flight as it may, and too many wait, or for too long."""

    status = 429
    kind = "engine_busy"
    code = "engine_busy"
    retry_after_s = 1


class Paused(BadCall):
    """Calls are held while the weights change."""

    status = 429
    kind = "paused"
    code = "paused"
    retry_after_s = 1


class EngineFault(ProxyError):
    """The engine's fault, of no kind below. `fault` is the label of its metric."""

    status = 502
    kind = "upstream_error"
    code = "engine_fault"
    public = "the engine failed"
    fault = "broke"


class EngineBroke(EngineFault):
    """The engine broke off, or its answer cannot be read."""

    code = "engine_broke_off"
    public = "the engine broke off, or its answer cannot be read"


class EventTooLong(EngineBroke):
    """An event of the engine's stream is longer than `engines.max_event_bytes`."""

    code = "engine_event_too_long"
    public = "the engine sent an event that is too long"


class EngineSilent(EngineFault):
    """The engine did not answer within the configured time."""

    status = 504
    code = "engine_timeout"
    public = "the engine did not answer in time"
    fault = "timeout"


class NoEngine(EngineFault):
    """The engine cannot be reached."""

    status = 503
    code = "engine_unreachable"
    public = "the engine cannot be reached"
    fault = "unreachable"
    retry_after_s = 1


class StoreFault(ProxyError):
    """The store cannot be reached, so the call is not made, or its end is not shown."""

    status = 503
    kind = "store_unavailable"
    code = "store_unavailable"
    public = "the store cannot be reached"
    retry_after_s = 1


class InternalError(ProxyError):
    """A defect of the proxy. The message has an error id; the proxy's log has the traceback under it."""

    error_id = ""
