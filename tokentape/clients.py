"""AsyncClient and Client: the control API over httpx2, with asyncio and blocking.

Each method is written once, as a coroutine of ControlApi. A transport that blocks never suspends it, so Client runs it to its
end without an event loop.
"""

import asyncio
import inspect
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Mapping
from contextlib import suppress
from functools import wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, Self, TypeVar, cast, get_args, overload

from tokentape.batches import Batch
from tokentape.control_api import NOT_FOUND, NOT_VALID, ControlApi
from tokentape.transport import (
    LOG,
    Beat,
    ClientError,
    Request,
    TaskHeartbeat,
    Transport,
    Wait,
    authorization,
    error_from_response,
    require,
)
from tokentape.types import ClaimedGroup, FinishStatus

with suppress(ImportError):  # `import tokentape` works without httpx2; the constructors raise
    import httpx2 as httpx

if TYPE_CHECKING:
    from tokentape.managed_server import ManagedServer

LOOK_S: Final = 15.0  # between two looks at whether a rollout that is played has ended
OUTAGE_S: Final = 120.0  # of the proxy, in which the finish of a rollout that was played is repeated
ENDED: Final = frozenset(get_args(FinishStatus))
SURPLUS: Final = "surplus"  # the reason of rollouts that their over-sampled group does not need
MAX_JOIN_S: Final = 5.0  # an extension in flight may end later; nothing reads its result

P = ParamSpec("P")
T = TypeVar("T")
U = TypeVar("U")
Agent = Callable[[Mapping[str, Any]], Awaitable[float | None]]


class AsyncClient(ControlApi):
    """A client of the control API at `url`. Close it, or use `async with`.

    `api_key` is a control key; it is required if the proxy has one configured. `timeout_s` limits the connection and each
    wait for data. Requests that return 429 or 503, or find no proxy at `url`, are sent up to `attempts` times, after the
    delay of the `Retry-After` header. Every failure is a ClientError.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 60.0, attempts: int = 5) -> None:
        require("httpx2", user="AsyncClient", requirement="httpx2>=2")
        super().__init__(url.rstrip("/"), AsyncTransport(url, api_key, timeout_s), attempts)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def play_group(self, size: int, agent: Agent, **options: Any) -> str:
        """Open a group with the options of `open_group`, play its rollouts concurrently, and return its ID.

        An agent that raises or hangs ends none of the others: see `play_rollout`.
        """
        group = await self.open_group(size, **options)
        await asyncio.gather(*(self.play_rollout(rollout, agent) for rollout in group["rollouts"]))
        return cast("str", group["group_id"])

    async def play_rollout(self, rollout: Mapping[str, Any], agent: Agent) -> str | None:
        """Run an agent in an opened rollout, and finish the rollout with the reward that `agent(rollout)` returns.

        An agent that raises is logged, unless its rollout is surplus, and its rollout is finished as `aborted`. If the rollout
        ends before the agent, by `idle_s`, `deadline_s` or as surplus, the agent is cancelled at most 15 s later. In both
        cases the agent runs again in the rollout that replaces this one, if the group has `replace`.

        Returns the ID of the rollout that is completed, or None.
        """
        playing: Mapping[str, Any] | None = rollout
        while playing is not None:
            rollout_id = playing["rollout_id"]
            try:
                reward = await self._until_ended(rollout_id, agent(playing))
                await self._complete(rollout_id, None if reward is None else float(reward))
            except Exception as error:  # noqa: BLE001 - of this agent: the others continue
                failure = error
            else:
                return cast("str", rollout_id)
            finished: Mapping[str, Any] = {}
            with suppress(ClientError):  # it has another status, or the proxy is unreachable and the limits finish it
                finished = await self.finish_rollout(rollout_id, "aborted")
            if finished.get("reason") == SURPLUS:  # ended while the agent ran: no failure
                LOG.info("rollout %r is surplus: its group was complete before its agent ended", rollout_id)
                return None
            LOG.error("the agent of rollout %r failed", rollout_id, exc_info=failure)
            playing = finished.get("replaced_by")
        return None

    async def _complete(self, rollout_id: str, reward: float | None) -> None:
        """Finish a rollout, also through an outage of the proxy: its agent has ended, and its tokens can be trained."""
        outage = Wait(OUTAGE_S)
        while True:
            try:
                await self.finish_rollout(rollout_id, reward=reward)
            except ClientError as error:
                if not (error.may_pass and outage.left_s) or error.code == NOT_VALID:
                    raise
                await self.transport.sleep(1.0)
            else:
                return

    async def _until_ended(self, rollout_id: str, running: Awaitable[float | None]) -> float | None:
        """Return the result of an agent; cancel it if its rollout ends before."""
        task = asyncio.ensure_future(running)  # noqa: TID251 - referenced here until it ends
        try:
            while not (await asyncio.wait({task}, timeout=LOOK_S))[0]:
                try:
                    seen = await self.rollout(rollout_id)
                except ClientError as error:
                    if error.status == NOT_FOUND:
                        raise
                else:
                    if seen["status"] in ENDED:
                        raise TimeoutError(
                            f"rollout {rollout_id!r} was finished as {seen['status']} before its agent ended"
                        )
            if task.cancelled():
                raise RuntimeError("the agent was cancelled")
            return task.result()
        finally:
            task.cancel()

    def managed_server(
        self,
        tokenizer: Any = None,
        base_url: str | None = None,
        preserve_think_blocks: bool = False,  # noqa: FBT001, FBT002 - Atropos' signature
        **options: Any,
    ) -> "ManagedServer":
        """Return a ManagedServer over a new rollout, as Atropos' server managers do; use it in an `async with`.

        Options are the further arguments of ManagedServer. `base_url` selects one of several servers in Atropos; here it is
        this proxy's URL or None.
        """
        from tokentape.managed_server import ManagedServer  # noqa: PLC0415 - it imports openai, which takes a second

        if base_url is not None and base_url.rstrip("/").removesuffix("/v1") != self.url:
            raise ValueError(f"base_url {base_url!r} is unknown: the only server is the proxy at {self.url}")
        return ManagedServer(self, tokenizer, preserve_think_blocks=preserve_think_blocks, **options)


class AsyncTransport(Transport):
    """Sends requests with httpx2 and asyncio. A heartbeat is a task."""

    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        self._http = httpx.AsyncClient(base_url=url, headers=authorization(api_key))
        self._timeout_s = timeout_s

    async def parts(self, request: Request) -> AsyncGenerator[bytes, None]:
        """Send a request, and yield the body of its response."""
        try:
            async with self._http.stream(**_arguments(request, self._timeout_s)) as response:
                if not response.is_success:
                    raise error_from_response(response.status_code, response.headers, await response.aread())
                async for part in response.aiter_bytes():
                    yield part
        except httpx.TransportError as error:
            raise _failure(request, self._http.base_url, error) from error

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()


class BlockingTransport(Transport):
    """Sends requests with httpx2 and blocks. A heartbeat is a thread."""

    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        self._http = httpx.Client(base_url=url, headers=authorization(api_key))
        self._timeout_s = timeout_s

    async def parts(self, request: Request) -> AsyncGenerator[bytes, None]:
        """Send a request, and yield the body of its response."""
        try:
            with self._http.stream(**_arguments(request, self._timeout_s)) as response:
                if not response.is_success:
                    raise error_from_response(response.status_code, response.headers, response.read())
                for part in response.iter_bytes():
                    yield part
        except httpx.TransportError as error:
            raise _failure(request, self._http.base_url, error) from error

    async def sleep(self, seconds: float) -> None:
        """Block."""
        time.sleep(seconds)  # noqa: ASYNC251 - no event loop runs

    def heartbeat(self, beat: Beat, interval_s: float) -> "ThreadHeartbeat":
        """Return a thread."""
        return ThreadHeartbeat(beat, interval_s)

    async def finished(self, result: object) -> None:
        """Raise TypeError if the callback is asynchronous: its update would not be made."""
        if inspect.iscoroutine(result):
            result.close()
        if inspect.isawaitable(result):
            raise TypeError(
                "Client.update_policy requires a blocking function; use AsyncClient for an asynchronous one."
            )

    async def close(self) -> None:
        """Close the connections."""
        self._http.close()


class ThreadHeartbeat(TaskHeartbeat):
    """Calls `beat` every `interval_s` in a thread, until it returns False or the heartbeat is stopped."""

    def __init__(self, beat: Beat, interval_s: float) -> None:
        super().__init__(beat, interval_s)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="tokentape-heartbeat", daemon=True)

    async def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    async def stop(self) -> None:
        """End the thread, and wait for a call of `beat` that is in progress."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(MAX_JOIN_S)

    def _repeat(self) -> None:
        while not self._stopped.wait(self.interval_s):
            if not run(self.beat()):
                return


def _arguments(request: Request, timeout_s: float) -> dict[str, Any]:
    return {
        "method": request.method,
        "url": request.path,
        "json": request.body,
        "params": request.query,
        "headers": request.headers,
        "timeout": httpx.Timeout(timeout_s, read=timeout_s + request.wait_s),
    }


def _failure(request: Request, url: object, error: Exception) -> ClientError:
    is_lost = not isinstance(error, httpx.ConnectError)
    where = f"{request.method} {str(url).rstrip('/')}{request.path}"
    return ClientError(
        f"{where}: {'connection lost: ' if is_lost else ''}{error}",
        code="connection_lost" if is_lost else "unreachable",
    )


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that nothing suspends, and return its result."""
    try:
        work.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise AssertionError("a transport that blocks suspended a coroutine")


def iterate(items: AsyncGenerator[Any, None], convert: Callable[[Any], Any] | None) -> Generator[Any, None, None]:
    """Yield the converted items of a generator that nothing suspends, and close it."""
    try:
        while True:
            item = run(items.__anext__())
            yield item if convert is None else convert(item)
    except StopAsyncIteration:
        return
    finally:
        run(items.aclose())


def _blocking(
    method: Callable[Concatenate[ControlApi, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["Client", P], T]:
    """Return a coroutine function of ControlApi as a method of Client."""

    @wraps(method)
    def call(self: "Client", /, *args: P.args, **options: P.kwargs) -> T:
        return run(method(self._api, *args, **options))

    return call


@overload
def _iterating(
    method: Callable[Concatenate[ControlApi, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate["Client", P], Generator[T, None, None]]: ...


@overload
def _iterating(
    method: Callable[Concatenate[ControlApi, P], AsyncGenerator[T, None]], convert: Callable[[T], U]
) -> Callable[Concatenate["Client", P], Generator[U, None, None]]: ...


def _iterating(method: Callable[..., AsyncGenerator[Any, None]], convert: Callable[[Any], Any] | None = None) -> Any:
    """Return an asynchronous generator function of ControlApi as a method of Client; `convert` is applied to what it yields."""

    @wraps(method)
    def call(self: "Client", /, *args: Any, **options: Any) -> Generator[Any, None, None]:
        return iterate(method(self._api, *args, **options), convert)

    signature = inspect.signature(method)
    kind = convert or get_args(signature.return_annotation)[0]
    call.__signature__ = signature.replace(return_annotation=Generator[kind, None, None])  # type: ignore[attr-defined, valid-type]
    call.__doc__ = (method.__doc__ or "").replace("async for", "for").replace("await ", "")
    return call


class BlockingBatch:
    """A Batch of Client: the same attributes, and methods that block."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self.claimed = batch.claimed
        self.options = batch.options
        self.batch_id = batch.batch_id

    @property
    def groups(self) -> list[ClaimedGroup]:
        """The groups. Raises ClientError as `check` does."""
        return self._batch.groups

    @property
    def is_lost(self) -> bool:
        """Whether the heartbeat has found that the lease is lost."""
        return self._batch.is_lost

    def check(self) -> None:
        """Raise ClientError (409, `lease_lost`) if the heartbeat has found that the lease is lost. Sends no request."""
        self._batch.check()

    def ack(self, *, delete: bool | None = None) -> None:
        """Acknowledge the batch; `delete` deletes its rollouts. Raises ClientError (404 or 409) if a group is lost."""
        run(self._batch.ack(delete=delete))

    def release(self) -> None:
        """Release the batch: other consumers can claim its groups."""
        run(self._batch.release())


class Client:
    """A client of the control API at `url`. Close it, or use `with`.

    `api_key` is a control key; it is required if the proxy has one configured. `timeout_s` limits the connection and each
    wait for data. Requests that return 429 or 503, or find no proxy at `url`, are sent up to `attempts` times, after the
    delay of the `Retry-After` header. Every failure is a ClientError.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 60.0, attempts: int = 5) -> None:
        require("httpx2", user="Client", requirement="httpx2>=2")
        self.url = url.rstrip("/")
        self._api = ControlApi(self.url, BlockingTransport(url, api_key, timeout_s), attempts)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    close = _blocking(ControlApi.close)
    send = _blocking(ControlApi.send)
    open_rollout = _blocking(ControlApi.open_rollout)
    rollout = _blocking(ControlApi.rollout)
    rollouts = _iterating(ControlApi.rollouts)
    patch_rollout = _blocking(ControlApi.patch_rollout)
    finish_rollout = _blocking(ControlApi.finish_rollout)
    delete_rollout = _blocking(ControlApi.delete_rollout)
    step = _blocking(ControlApi.step)
    steps = _iterating(ControlApi.steps)
    tree = _blocking(ControlApi.tree)
    events = _iterating(ControlApi.events)
    export_rollout = _iterating(ControlApi.export_rollout)
    export_group = _iterating(ControlApi.export_group)
    export = _iterating(ControlApi.export)
    open_group = _blocking(ControlApi.open_group)
    branches = _blocking(ControlApi.branches)
    values = _blocking(ControlApi.values)
    group = _blocking(ControlApi.group)
    groups = _iterating(ControlApi.groups)
    requeue_group = _blocking(ControlApi.requeue_group)
    delete_group = _blocking(ControlApi.delete_group)
    claim_batch = _blocking(ControlApi.claim_batch)
    ack_batch = _blocking(ControlApi.ack_batch)
    release_batch = _blocking(ControlApi.release_batch)
    extend_batch = _blocking(ControlApi.extend_batch)
    mismatch = _blocking(ControlApi.mismatch)
    batch_mismatch = _blocking(ControlApi.batch_mismatch)
    batches = _iterating(ControlApi.batches, BlockingBatch)
    policies = _blocking(ControlApi.policies)
    policy = _blocking(ControlApi.policy)
    put_policy = _blocking(ControlApi.put_policy)
    pause = _blocking(ControlApi.pause)
    resume = _blocking(ControlApi.resume)
    update_policy = _blocking(ControlApi.update_policy)
    load_adapter = _blocking(ControlApi.load_adapter)
