"""Laws of commands while the servers of a cluster change: simulated servers, as real ones do not change in any order."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st
from redis.crc import key_slot
from redis.exceptions import AskError, ClusterDownError, MovedError, TryAgainError

from storage.errors import StoreUnreachable
from storage.redis.cluster import Cluster

KEY = b"key"
SLOT = key_slot(KEY)
PORTS = (1, 2, 3)
TIMEOUT_S = 0.1

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("move"), st.sampled_from(PORTS)),
        st.tuples(st.just("import"), st.sampled_from(PORTS)),
        st.tuples(st.sampled_from(["die", "return", "forget"]), st.sampled_from(PORTS)),
        st.tuples(st.just("down"), st.booleans()),
    ),
    max_size=12,
)


class Server:
    def __init__(self, cluster, host, port):
        self.cluster, self.port, self.address = cluster, port, f"{host}:{port}"
        self.unreachable, self.is_suspect = None, False

    async def execute(self, key, commands, **_):
        return await self.cluster.execute(self.port, key, commands)

    def retire(self):
        pass

    async def close(self):
        pass


class Simulated:
    """Servers of a cluster. `owner` has the slot, which moves to `importing`; `views` are the owners as each server knows."""

    def __init__(self):
        self.owner, self.importing, self.down = 1, None, False
        self.dead, self.views = set(), dict.fromkeys(PORTS, 1)
        self.executed = []

    def apply(self, kind, value):
        if kind == "move":  # the old owner and the new one know it, others later
            self.views |= {self.owner: value, value: value}
            self.owner, self.importing = value, None
        elif kind == "import":
            self.importing = None if value == self.owner else value
        elif kind == "die":
            self.dead.add(value)
        elif kind == "return":
            self.dead.discard(value)
        elif kind == "forget":
            self.views[value] = self.owner
        else:
            self.down = value

    def settle(self):
        """Let all servers live and know the owner."""
        self.dead, self.down, self.importing = set(), False, None
        self.views = dict.fromkeys(PORTS, self.owner)

    def server(self, host, port, _refresh):
        return Server(self, host, port)

    async def execute(self, port, key, commands):
        await asyncio.sleep(0)
        if port in self.dead:
            raise StoreUnreachable("dead", f"h:{port}")
        if commands[0] == ("CLUSTER", "SLOTS"):
            return [[[0, 16_383, [b"h", self.views[port]]]]]
        replies = []
        is_asking = False
        for command in commands:
            replies.append(b"OK" if command == ("ASKING",) else self.reply(port, command, is_asking=is_asking))
            is_asking = command == ("ASKING",)
        return replies

    def reply(self, port, command, *, is_asking):
        if self.down:
            return ClusterDownError("The cluster is down")
        if is_asking and port == self.importing:
            return TryAgainError("Multiple keys request during rehashing of slot")
        if port != self.owner:
            target = self.views[port]
            return MovedError(f"{SLOT} h:{self.owner if target == port else target}")
        if self.importing is not None:
            return AskError(f"{SLOT} h:{self.importing}")
        self.executed.append(command)
        return b"done"


@settings(deadline=None, max_examples=80)
@given(EVENTS, st.integers(1, 3))
def test_a_command_reaches_the_owner_or_fails_within_the_timeout(events, count):
    """Whatever happens meanwhile; and once the cluster is whole, every command succeeds."""
    asyncio.run(check(events, count))


async def check(events, count):
    simulated = Simulated()
    cluster = Cluster([("h", port) for port in PORTS], simulated.server, TIMEOUT_S)
    commands = [("ECHO", number) for number in range(count)]
    calls = []
    loop = asyncio.get_running_loop()
    for event in events:
        calls.append(asyncio.create_task(timed(loop, cluster.execute(KEY, commands))))
        for _ in range(4):
            await asyncio.sleep(0)
        simulated.apply(*event)
    outcomes = await asyncio.gather(*calls)
    simulated.settle()
    simulated.executed.clear()
    last = await cluster.execute(KEY, commands)
    ran = list(simulated.executed)
    await cluster.close()

    for outcome, seconds in outcomes:
        assert outcome == [b"done"] * count or isinstance(outcome, StoreUnreachable)
        assert seconds < TIMEOUT_S + 0.5
    assert (last, ran[-count:]) == ([b"done"] * count, commands)


async def timed(loop, call):
    began = loop.time()
    try:
        return await call, loop.time() - began
    except StoreUnreachable as error:
        return error, loop.time() - began
