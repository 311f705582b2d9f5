"""The Lua scripts: what must happen on the server at once or not at all.

Holds the scripts of rollouts, each with the reason why it needs to be one, and how a script is called. It must not talk to
a server. Where nothing else is said they get the seven keys of `RolloutKeys.all()` and begin with the arguments: encoded
name, now_ms, ttl_s (0: none). They use declared keys only, so that every server and proxy of the Redis protocol takes them.
"""

from collections.abc import Awaitable, Sequence
from hashlib import sha1
from typing import Any, Final, Protocol, TypeAlias

Command: TypeAlias = tuple[bytes | str | int, ...]


class Script:
    """A script and its hash, by which a server that saw it once knows it."""

    __slots__ = ("_sha", "_text")

    def __init__(self, text: str) -> None:
        self._text = text
        self._sha = sha1(text.encode(), usedforsecurity=False).hexdigest()

    def call(self, keys: Sequence[bytes], arguments: Sequence[bytes | str | int]) -> Command:
        """Run it, if the server knows it; else it answers NOSCRIPT."""
        return ("EVALSHA", self._sha, len(keys), *keys, *arguments)

    def teach(self, command: Command) -> Command:
        """The same call with the whole text, which the server remembers."""
        return ("EVAL", self._text, *command[2:])


class Run(Protocol):
    """How a script is run: with its keys and arguments, on the server of the first key, and a write durably."""

    def __call__(self, script: Script, keys: Sequence[bytes], arguments: Sequence[bytes | str | int]) -> Awaitable[Any]:
        """The script's reply."""
        ...


# Members whose time has come leave both sets together. The server's clock decides, as it does over the keys' expiry.
_PRUNE: Final = """
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
local function prune(listing, expiry, limit)
  local dead = redis.call('ZRANGE', expiry, '-inf', now_ms(), 'BYSCORE', 'LIMIT', 0, limit)
  for _, member in ipairs(dead) do
    redis.call('ZREM', listing, member)
    redis.call('ZREM', expiry, member)
  end
  return #dead
end
"""

# Ten: each write adds at most one member, so what died is taken out faster than anything can pile up. Who listens is told of
# changes (`pcall`: a user whose ACL has no channels may write all the same); to tell nobody costs next to nothing.
_TOUCH: Final = (
    _PRUNE
    + """
local function member()
  return string.format('%015d', redis.call('HGET', KEYS[1], 'created_ms')) .. ARGV[1]
end
local function renew()
  local ttl_ms = ARGV[3] * 1000
  if ttl_ms > 0 then
    redis.call('ZADD', KEYS[7], now_ms() + ttl_ms, member())
    for i = 1, 7 do redis.call('PEXPIRE', KEYS[i], ttl_ms) end
    prune(KEYS[6], KEYS[7], 10)
  end
end
local function touch()
  redis.call('HSET', KEYS[1], 'touched_ms', ARGV[2])
  renew()
end
local function tell(record)
  redis.pcall('PUBLISH', KEYS[6], ARGV[1] .. record)
end
"""
)

# Who holds a place, and until when, is one field of text: `name=until_ms ` for each. A lease that is over is not counted,
# so that the places of a process that died come free.
_PLACES: Final = """
local function held_by_others(name)
  local kept, now = {}, now_ms()
  for holder, until_ms in string.gmatch(redis.call('HGET', KEYS[1], 'held') or '', '([^ =]+)=(%d+) ') do
    if holder ~= name and tonumber(until_ms) > now then kept[#kept + 1] = holder .. '=' .. until_ms .. ' ' end
  end
  return kept
end
local function hold(kept, name, lease_ms)
  if lease_ms > 0 then kept[#kept + 1] = name .. '=' .. string.format('%.0f', now_ms() + lease_ms) .. ' ' end
  if #kept > 0 then redis.call('HSET', KEYS[1], 'held', table.concat(kept)) else redis.call('HDEL', KEYS[1], 'held') end
end
"""

# Many callers open one name at once: one birth, one set of fields, one entry in the listing. What is announced is told
# along. A place is given while records and places held are fewer than the field `places` says: 1 or 0, or nothing where
# there is no such field. Keys: the seven, then the notices. Arguments: birth, place ('': none is wanted), lease_ms, then
# field, value, ….
OPEN: Final = Script(
    _TOUCH
    + _PLACES
    + """
if redis.call('HSETNX', KEYS[1], 'birth', ARGV[4]) == 1 then
  redis.call('HSET', KEYS[1], 'created_ms', ARGV[2])
  for i = 7, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
  redis.call('ZADD', KEYS[6], 0, member())
  tell('')
end
touch()
local places, given = ARGV[5] ~= '' and redis.call('HGET', KEYS[1], 'f:places'), false
if places then
  local kept = held_by_others(ARGV[5])
  given = redis.call('LLEN', KEYS[2]) + #kept < tonumber(places) and 1 or 0
  if given == 1 then hold(kept, ARGV[5], tonumber(ARGV[6])) end
end
return {redis.call('HGETALL', KEYS[1]), redis.call('HGETALL', KEYS[8]), given}
"""
)

# The first bucket numbers what is announced; the others take over what has a higher number than what they have: so all
# agree in the end, whoever else announces meanwhile. Keys: the notices. Arguments: name, value, number ('' to be given one).
ANNOUNCE: Final = Script("""
local had = tonumber(redis.call('HGET', KEYS[1], 'number:' .. ARGV[1]) or 0)
local number = ARGV[3] == '' and had + 1 or tonumber(ARGV[3])
if number > had then
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[2], 'number:' .. ARGV[1], number)
end
return number
""")
NOTICES: Final = Script("return redis.call('HGETALL', KEYS[1])")

# Who has not beaten for a life is taken out, by the server's clock. Keys: the notices, the beats. Arguments: name, life_ms (0:
# take it out), value.
BEAT: Final = Script("""
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local life, alive = tonumber(ARGV[2]), {}
if life == 0 then
  redis.call('HDEL', KEYS[2], ARGV[1])
else
  redis.call('HSET', KEYS[2], ARGV[1], string.format('%015.0f', now + life) .. ARGV[3])
  redis.call('PEXPIRE', KEYS[2], life)
end
local beats = redis.call('HGETALL', KEYS[2])
for i = 1, #beats, 2 do
  if tonumber(string.sub(beats[i + 1], 1, 15)) < now then
    redis.call('HDEL', KEYS[2], beats[i])
  else
    alive[#alive + 1] = beats[i]
    alive[#alive + 1] = string.sub(beats[i + 1], 16)
  end
end
return {redis.call('HGETALL', KEYS[1]), alive}
""")

# A group and all its rollouts come into being at once or not at all; a group that is there stays as it is. Keys: those of
# the group, then those of each rollout. Arguments: now_ms, ttl_s, how many, then for each: encoded name, birth, how many
# fields, field, value, ….
OPEN_ALL: Final = Script(
    _PRUNE
    + """
if redis.call('EXISTS', KEYS[1]) == 0 then
  local ttl_ms, at = ARGV[2] * 1000, 4
  for first = 0, (ARGV[3] - 1) * 7, 7 do
    local name, birth, fields = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2])
    local member = string.format('%015d', ARGV[1]) .. name
    if redis.call('HSETNX', KEYS[first + 1], 'birth', birth) == 1 then
      redis.call('HSET', KEYS[first + 1], 'created_ms', ARGV[1], 'touched_ms', ARGV[1])
      for i = at + 3, at + 1 + 2 * fields, 2 do redis.call('HSET', KEYS[first + 1], ARGV[i], ARGV[i + 1]) end
      redis.call('ZADD', KEYS[first + 6], 0, member)
      if ttl_ms > 0 then
        redis.call('ZADD', KEYS[first + 7], now_ms() + ttl_ms, member)
        for i = first + 1, first + 7 do redis.call('PEXPIRE', KEYS[i], ttl_ms) end
      end
      redis.pcall('PUBLISH', KEYS[first + 6], name)
    end
    at = at + 3 + 2 * fields
  end
end
return redis.call('HGETALL', KEYS[1])
"""
)

# Expectations at ARGV[at]: how many, then field and '=' .. value (or '' for absent) for each. Changes are the same to the end.
CHANGES: Final = (
    _TOUCH
    + """
local function expected(at)
  for i = at + 1, at + 2 * ARGV[at], 2 do
    local value = redis.call('HGET', KEYS[1], ARGV[i])
    if (value and '=' .. value or '') ~= ARGV[i + 1] then return false end
  end
  return true
end
local function change(first)
  for i = first, #ARGV, 2 do
    if ARGV[i + 1] == '' then redis.call('HDEL', KEYS[1], ARGV[i])
    else redis.call('HSET', KEYS[1], ARGV[i], string.sub(ARGV[i + 1], 2)) end
  end
  touch()
  tell('')
end
"""
)

# Compare and set: between looking and writing nobody else may write. Arguments: expectations, then changes.
AMEND: Final = Script(
    CHANGES
    + """
if redis.call('EXISTS', KEYS[1]) == 0 then return false end
if not expected(4) then return {0, redis.call('HGETALL', KEYS[1])} end
change(5 + 2 * ARGV[4])
return {1, redis.call('HGETALL', KEYS[1])}
"""
)

# A place is held for longer, or no more (lease_ms 0), by the life that was opened. Arguments: birth, place, lease_ms.
HOLD: Final = Script(
    _PRUNE
    + _PLACES
    + """
if redis.call('HGET', KEYS[1], 'birth') == ARGV[4] then hold(held_by_others(ARGV[5]), ARGV[5], tonumber(ARGV[6])) end
return 0
"""
)

# Whether a birth that is not the rollout's was deleted. It may have expired instead, if rollouts do. Key 8: the deleted.
_DELETED: Final = """
local function was_deleted(birth)
  return tonumber(ARGV[3]) == 0 or redis.call('ZSCORE', KEYS[8], birth) ~= false
end
"""

# A record, its blocks, its position and its counts are stored together or not at all, and once; a place that was held by its
# name is the record's now. A repeated append writes too (touch): only a write of this connection's own makes WAIT and WAITAOF
# wait for what the lost first call wrote. If the life that was opened has expired, the rollout is restored by its origin; if
# another life was opened since, that one gets the record. Where the field `late_if` is there, the write that stores the record
# marks it as late: so whoever reads the rollout after that field was set cannot take the record for one that came before.
# Keys: the seven, then the deleted. Arguments: birth, name, record, how many blocks leant on, how many new ones, late_if ('':
# none), created_ms of the origin ('': no origin is given), how many fields it has; then the names of the blocks leant on, name
# and bytes of each new one, name and value of each field, and count, number, ….
# Answers {position, is late, was restored}; {-1} for a deleted life; {-2} for one that expired; {-3, missing block, …}.
APPEND: Final = Script(
    _TOUCH
    + _PLACES
    + _DELETED
    + """
local birth = redis.call('HGET', KEYS[1], 'birth')
local is_restored = birth ~= ARGV[4] and 1 or 0
if is_restored == 1 then
  if was_deleted(ARGV[4]) then return {-1} end
  if ARGV[10] == '' then return {-2} end
end
local position = redis.call('HGET', KEYS[3], ARGV[5])
if not position then
  local first_block = 12 + ARGV[7]
  local first_field = first_block + 2 * ARGV[8]
  local first_count = first_field + 2 * ARGV[11]
  local missing = {-3}
  for i = 12, first_block - 1 do
    if redis.call('HEXISTS', KEYS[4], ARGV[i]) == 0 then missing[#missing + 1] = ARGV[i] end
  end
  if #missing > 1 then return missing end
  if not birth then
    redis.call('HSET', KEYS[1], 'birth', ARGV[4], 'created_ms', ARGV[10])
    for i = first_field, first_count - 1, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
    redis.call('ZADD', KEYS[6], 0, member())
    tell('')
  end
  for i = first_block, first_field - 1, 2 do redis.call('HSETNX', KEYS[4], ARGV[i], ARGV[i + 1]) end
  position = redis.call('RPUSH', KEYS[2], ARGV[6]) - 1
  redis.call('HSET', KEYS[3], ARGV[5], position)
  for i = first_count, #ARGV, 2 do redis.call('HINCRBY', KEYS[1], ARGV[i], ARGV[i + 1]) end
  if redis.call('HEXISTS', KEYS[1], 'held') == 1 then hold(held_by_others(ARGV[5]), ARGV[5], 0) end
  if ARGV[9] ~= '' and redis.call('HEXISTS', KEYS[1], 'f:' .. ARGV[9]) == 1 then
    redis.call('HSET', KEYS[5], 'late:' .. ARGV[5], '1')
    redis.call('HINCRBY', KEYS[1], 'n:late', 1)
  end
  tell(' ' .. position .. ' ' .. ARGV[5])
end
touch()
return {tonumber(position), redis.call('HEXISTS', KEYS[5], 'late:' .. ARGV[5]), is_restored}
"""
)

# A mark goes where the record that it is about went, and must not outlive it. Keys: the seven, then the deleted. Arguments:
# birth, then mark, value, ….
MARK: Final = Script(
    _TOUCH
    + _DELETED
    + """
local birth = redis.call('HGET', KEYS[1], 'birth')
if not birth or (birth ~= ARGV[4] and was_deleted(ARGV[4])) then return -1 end
for i = 5, #ARGV, 2 do redis.call('HSET', KEYS[5], ARGV[i], ARGV[i + 1]) end
touch()
tell('')
return 0
"""
)

# The lifetime begins anew, and nothing else changes. Argument: birth ('': of any life).
RENEW: Final = Script(
    _TOUCH
    + """
local birth = redis.call('HGET', KEYS[1], 'birth')
if not birth or (ARGV[4] ~= '' and ARGV[4] ~= birth) then return 0 end
renew()
return 1
"""
)

# All keys and the entry in the listing go at once: nobody may append to, or list, half a rollout. Where rollouts expire, the
# birth is kept for a while: else a late append would restore the rollout. Keys: the seven, then the deleted.
DROP: Final = Script(
    _TOUCH
    + """
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
local kept_ms = ARGV[3] * 1000
if kept_ms > 0 then
  kept_ms = math.max(kept_ms, 86400000)
  redis.call('ZREMRANGEBYSCORE', KEYS[8], '-inf', now_ms())
  redis.call('ZADD', KEYS[8], now_ms() + kept_ms, redis.call('HGET', KEYS[1], 'birth'))
  redis.call('PEXPIRE', KEYS[8], kept_ms)
end
redis.call('ZREM', KEYS[7], member())
redis.call('ZREM', KEYS[6], member())
redis.call('UNLINK', KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5])
tell('')
return 1
"""
)

# Position and record must be of one life of the rollout. Argument: name.
FIND: Final = Script("""
local position = redis.call('HGET', KEYS[3], ARGV[4])
if not position then return false end
return {tonumber(position), redis.call('LINDEX', KEYS[2], position)}
""")

# What expired must not be listed, so it is taken out first. Keys: listing, expiry. Arguments: newest and oldest member
# (as ZRANGE BYLEX wants them), limit.
LIST: Final = Script(
    _PRUNE
    + """
while prune(KEYS[1], KEYS[2], 1000) == 1000 do end
return redis.call('ZRANGE', KEYS[1], ARGV[1], ARGV[2], 'BYLEX', 'REV', 'LIMIT', 0, ARGV[3])
"""
)
