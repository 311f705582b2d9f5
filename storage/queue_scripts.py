"""The Lua scripts of the queue: a stream for each bucket, read by one consumer group.

Holds what must happen to a group and to its entry at once or not at all. Which entry is whose, and since when, is the
consumer group's own list of pending entries, so that claiming, and claiming from one that fell silent, are the server's. An
entry is pending from the start: for the consumer `-`, which is nobody, and idle for longer than any lease. A lease of less
than the longest is taken by being idle for the rest already (`XCLAIM … IDLE`): so whoever may take an entry need not know
whose lease it was, and the server's clock alone decides.

All but `FREE` get the seven keys of the group (`RolloutKeys.all()`), then the stream, and begin with the arguments: encoded
name, now_ms, ttl_s.
"""

from typing import Final

from storage.queue import LONGEST_LEASE_MS
from storage.scripts import CHANGES, Script

_PENDING: Final = f"""
local LONGEST = {LONGEST_LEASE_MS}
local function give(stream, place, holder, idle)
  return #redis.call('XCLAIM', stream, 'holders', holder, 0, place, 'IDLE', idle, 'JUSTID') == 1
end
"""

# With a ttl, entries of groups that must long be gone are cut off. Arguments: note, expectations, changes.
OFFER: Final = Script(
    CHANGES
    + _PENDING
    + """
if redis.call('EXISTS', KEYS[1]) == 0 then return false end
if not expected(5) then return {0, redis.call('HGETALL', KEYS[1])} end
if redis.call('EXISTS', KEYS[8]) == 0 then redis.call('XGROUP', 'CREATE', KEYS[8], 'holders', '0', 'MKSTREAM') end
local place = redis.call('XADD', KEYS[8], '*', 'group', ARGV[1], 'note', ARGV[4])
redis.call('XREADGROUP', 'GROUP', 'holders', '-', 'STREAMS', KEYS[8], '>')
give(KEYS[8], place, '-', LONGEST)
local ttl_ms = ARGV[3] * 1000
if ttl_ms > 0 then
  redis.call('XTRIM', KEYS[8], 'MINID', '~', string.format('%.0f', math.max(0, now_ms() - 2 * ttl_ms - LONGEST)))
end
change(6 + 2 * ARGV[5])
return {1, redis.call('HGETALL', KEYS[1])}
"""
)

# From one holder to another, '-' being nobody and '' out of the queue. From nobody is also: from one whose lease ran out. An
# entry that is there already may have been moved by this very script, whose answer was lost. A group that is no more leaves
# the queue. Arguments: from, to, place, how long the entry is to be idle, changes.
MOVE: Final = Script(
    CHANGES
    + _PENDING
    + """
if redis.call('EXISTS', KEYS[8]) == 0 then return 0 end
local from, to, place = ARGV[4], ARGV[5], ARGV[6]
local pending = redis.call('XPENDING', KEYS[8], 'holders', place, place, 1)[1]
if not pending then return 0 end
local owner, is_free = pending[2], pending[3] >= LONGEST
if owner ~= to and owner ~= from and not (from == '-' and is_free) then return 0 end
local is_gone = redis.call('EXISTS', KEYS[1]) == 0
if to == '' or is_gone then
  redis.call('XACK', KEYS[8], 'holders', place)
  redis.call('XDEL', KEYS[8], place)
elseif not give(KEYS[8], place, to, ARGV[7]) then return 0 end
if owner ~= '-' and owner ~= to and #redis.call('XPENDING', KEYS[8], 'holders', '-', '+', 1, owner) == 0 then
  redis.call('XGROUP', 'DELCONSUMER', KEYS[8], 'holders', owner)
end
if is_gone then return 0 end
change(8)
return 1
"""
)

# Those of a bucket that anybody may hold, the oldest first. Keys: the stream. Arguments: how many.
FREE: Final = Script(
    _PENDING
    + """
if redis.call('EXISTS', KEYS[1]) == 0 then return {} end
local found = {}
for _, pending in ipairs(redis.call('XPENDING', KEYS[1], 'holders', 'IDLE', LONGEST, '-', '+', ARGV[1])) do
  local entry = redis.call('XRANGE', KEYS[1], pending[1], pending[1])[1]
  if entry then found[#found + 1] = {entry[1], entry[2][2], entry[2][4]}
  else redis.call('XACK', KEYS[1], 'holders', pending[1]) end
end
return found
"""
)
