"""The errors that clients can receive: HTTP status, type, code and message.

A condition has the same status in all dialects, which determine the format of the body only.

    ProxyError                       never raised itself
    ├── BadRequest             400   the request is malformed
    │   ├── Unauthorized       401   the API key is missing or invalid
    │   ├── Forbidden          403   the API key does not permit the request
    │   ├── UnknownHost        403   the `Host` is not allowed without API keys
    │   ├── CrossSite          403   a web page of another origin sent the request, and no API key is required
    │   ├── NotFound           404   the path, rollout or step does not exist
    │   ├── RequestTimeout     408   receiving the request body timed out
    │   ├── Conflict           409   the request conflicts with the stored state
    │   ├── RolloutClosed      409   the rollout is finished
    │   │   └── PlaybackSourceGone  410   the rollout whose steps answer a playback was deleted, or has expired
    │   ├── LeaseLost          409   the lease of the batch expired
    │   ├── LowerVersion       409   the version of a policy is lower than the announced one
    │   ├── Damaged            409   a stored rollout, group or batch is unreadable
    │   │   └── DamagedStep    409   a stored step is unreadable
    │   ├── RequestTooLarge    413   the request body is too large
    │   ├── UnsupportedEncoding     415   the content encoding is not supported
    │   ├── ExpectationFailed  417   the `Expect` header is not supported
    │   ├── UnprocessableRequest    422   a value is not allowed
    │   │   ├── InvalidValue   400   the dialect does not allow a value, as the API that it is of responds
    │   │   └── PlaybackMismatch    422   a playback's tape does not have the call
    │   ├── UpgradeRequired    426   the request is for a WebSocket
    │   ├── LimitReached       429   a limit of the rollout is reached
    │   ├── Overloaded         429   the calls in flight use too much memory
    │   ├── EngineBusy         429   the queue of the engine is full, or waiting in it timed out
    │   └── Paused             429   calls are paused while the weights change
    ├── EngineError            502   the engine failed
    │   ├── EngineDisconnected 502   the engine disconnected, or its response is invalid
    │   │   ├── EngineResponseTooLarge  502   a response is larger than `engines.max_response_bytes`
    │   │   └── EngineEventTooLong  502   an event is larger than `engines.max_event_bytes`
    │   ├── EngineTimeout      504   the engine timed out
    │   └── EngineUnreachable  503   the engine is unreachable
    ├── StoreUnavailable       503   the store is unavailable
    └── InternalError          500   a defect of the proxy; the log has the traceback under the error id

Agents must not receive addresses and paths: `for_agents` replaces the messages of errors that may contain them.
"""

import os
import re
import ssl
from socket import gaierror
from typing import Final, Self

_ERRNO: Final = re.compile(r"\[Errno (\d+)\]")
_OF_OPENSSL: Final = re.compile(r"^\[.*?\] | \(_ssl\.c:\d+\)$")  # `[SSL: WRONG_VERSION_NUMBER] … (_ssl.c:1006)`


class ProxyError(Exception):
    """Base class. The response contains `status`, `kind` (as `type`) and `code`.

    `public` is the message for agents if `message` contains details of the installation (addresses, paths).
    """

    status = 500
    kind = "server_error"
    code: str = "internal_error"
    public: str | None = None
    retry_after_s: int | None = None

    def __init__(self, message: str, *, param: str | None = None, public: str | None = None) -> None:
        if type(self) is ProxyError:
            raise TypeError("raise a subclass of ProxyError")
        super().__init__(message)
        self.message = message
        self.param = param
        if public is not None:
            self.public = public

    def for_agents(self, reference: str) -> Self:
        """Return the error for agents. `reference` is an id under which the log has the full message."""
        return self if self.public is None else type(self)(f"{self.public} ({reference}).", param=self.param)


class BadRequest(ProxyError):
    """The request is malformed."""

    status = 400
    kind = "invalid_request_error"
    code = "bad_request"


class Unauthorized(BadRequest):
    """The API key is missing or invalid."""

    status = 401
    kind = "authentication_error"
    code = "invalid_api_key"


class Forbidden(BadRequest):
    """The API key does not permit this request."""

    status = 403
    kind = "permission_error"
    code = "forbidden"


class UnknownHost(Forbidden):
    """The `Host` of the request is not allowed while the API requires no key. The message names the setting."""

    code = "unknown_host"


class CrossSite(Forbidden):
    """A web page of another origin sent the request, and the API requires no key."""

    code = "cross_site"


class NotFound(BadRequest):
    """The path, model, rollout, group, batch or step does not exist."""

    status = 404
    kind = "not_found_error"
    code = "not_found"


class RequestTimeout(BadRequest):
    """Receiving the request body timed out."""

    status = 408
    code = "request_timeout"


class Conflict(BadRequest):
    """The request conflicts with what is stored, such as another reward or other terms."""

    reason: str = "format"  # for which a claim refuses a group
    status = 409
    kind = "conflict_error"
    code = "conflict"


class RolloutClosed(Conflict):
    """The rollout is finished and accepts no more calls."""

    kind = "rollout_closed"
    code = "rollout_closed"


class PlaybackSourceGone(RolloutClosed):
    """The rollout whose steps answer the calls of a playback was deleted, or has expired; what was answered is kept."""

    status = 410
    kind = "playback_source_gone"
    code = "playback_source_gone"


class LeaseLost(Conflict):
    """The lease of the batch expired, and another consumer claimed its groups."""

    kind = "lease_lost"
    code = "lease_lost"


class LowerVersion(Conflict):
    """The version of a policy is lower than the announced one, and no new epoch begins."""

    code = "lower_version"


class Damaged(Conflict):
    """A stored rollout, group or batch is unreadable. Readers of several omit it and name it."""

    reason = "damaged_record"
    code = "damaged_record"
    public = "A stored record of the rollout is unreadable"

    def __init__(
        self,
        message: str,
        *,
        entity: str = "rollout",
        name: str = "",
        param: str | None = None,
        public: str | None = None,
    ) -> None:
        super().__init__(message, param=param, public=public)
        self.entity = entity  # what is damaged
        self.name = name  # its ID; of a step, the ID of its rollout


class DamagedStep(Damaged):
    """A stored step of the rollout is unreadable."""

    reason = "damaged_step"
    code = "damaged_step"

    def __init__(self, message: str, *, name: str = "", param: str | None = None, public: str | None = None) -> None:
        super().__init__(message, entity="step", name=name, param=param, public=public)


class RequestTooLarge(BadRequest):
    """The request body has more bytes, or more JSON values for its length, than the limits allow."""

    status = 413
    kind = "request_too_large"
    code = "request_too_large"


class UnsupportedEncoding(BadRequest):
    """The content encoding is not supported; gzip, deflate, zstd and identity are."""

    status = 415
    code = "unsupported_encoding"


class ExpectationFailed(BadRequest):
    """The request has an `Expect` header other than 100-continue."""

    status = 417
    code = "expectation_failed"


class UnprocessableRequest(BadRequest):
    """A value is not allowed; the message names the field."""

    status = 422
    code = "unprocessable_request"


class InvalidValue(UnprocessableRequest):
    """A value of a call is not allowed, or cannot be translated to chat. The API of the dialect has the same status."""

    status = 400
    code = "invalid_value"


class PlaybackMismatch(UnprocessableRequest):
    """A playback's tape does not have the call, and the call must not be sampled: the agent or its inputs have changed."""

    code = "playback_mismatch"


class UpgradeRequired(BadRequest):
    """The request is for a WebSocket, which the model API does not have. Codex 0.169 then uses HTTP at once."""

    status = 426
    code = "upgrade_required"


class LimitReached(BadRequest):
    """A limit of the rollout is reached."""

    status = 429
    kind = "rollout_limit"
    code = "rollout_limit"
    retry_after_s = 60


class Overloaded(BadRequest):
    """The calls in flight use as many bytes, or this process has as many connections, as the settings of agents allow."""

    status = 429
    kind = "overloaded"
    code = "overloaded"
    retry_after_s = 1


class EngineBusy(BadRequest):
    """The engine has `max_in_flight` calls, and its queue is full or the call timed out in it."""

    status = 429
    kind = "engine_busy"
    code = "engine_busy"
    retry_after_s = 1


class Paused(BadRequest):
    """Calls are paused while the weights change."""

    status = 429
    kind = "paused"
    code = "paused"
    retry_after_s = 1


class EngineError(ProxyError):
    """The engine failed in another way than those below."""

    status = 502
    kind = "upstream_error"
    code = "engine_error"
    public = "The engine failed"
    fault = "disconnected"  # value of the label `fault` of the metric engine_faults


class EngineDisconnected(EngineError):
    """The engine disconnected, or its response is invalid."""

    code = "engine_disconnected"
    public = "The engine disconnected, or its response is invalid"


class EngineResponseTooLarge(EngineDisconnected):
    """The engine's response is larger than `engines.max_response_bytes`, or than the memory that other calls leave."""

    code = "engine_response_too_large"
    public = "The engine's response is too large"


class EngineEventTooLong(EngineDisconnected):
    """An event of the engine's stream is larger than `engines.max_event_bytes`."""

    code = "engine_event_too_long"
    public = "The engine sent an event that is too large"


class EngineTimeout(EngineError):
    """The engine did not respond within `engines.read_timeout_s`."""

    status = 504
    code = "engine_timeout"
    public = "The engine timed out"
    fault = "timeout"


class EngineUnreachable(EngineError):
    """The engine is unreachable."""

    status = 503
    code = "engine_unreachable"
    public = "The engine is unreachable"
    fault = "unreachable"
    retry_after_s = 1


class StoreUnavailable(ProxyError):
    """The store is unavailable, so the call is not sent, or the end of its response is withheld."""

    status = 503
    kind = "store_unavailable"
    code = "store_unavailable"
    public = "The store is unavailable"
    retry_after_s = 1


class InternalError(ProxyError):
    """A defect of the proxy. The message has an error id, under which the log has the traceback."""

    error_id = ""


def failure_text(error: BaseException) -> str:
    """Return the message of any error, or its type if the message is empty; for a failed connection, a sentence."""
    cause = getattr(error, "os_error", None)  # of aiohttp's ClientConnectorError, which also has the address
    if isinstance(cause, OSError):
        return f"cannot connect to {getattr(error, 'host', '?')}:{getattr(error, 'port', '?')}: {_reason(cause)}"
    return _reason(error) if isinstance(error, OSError) else str(error) or type(error).__name__


def _reason(error: OSError) -> str:
    """Return the reason of an operating system error, such as `Connection refused`, with the file that it is about."""
    if isinstance(error, ssl.SSLError | gaierror) or not error.errno:
        if codes := dict.fromkeys(map(int, _ERRNO.findall(str(error)))):  # several addresses of a host failed
            return ", ".join(map(os.strerror, codes))
        return _OF_OPENSSL.sub("", error.strerror or str(error)) or type(error).__name__
    return os.strerror(error.errno) + ("" if error.filename is None else f": {error.filename}")
