-- Add a group to queues. With a TTL, trim entries of groups that must have expired. Return {1, state, ID of each entry, ...}.
-- KEYS: the seven keys of the group, then a stream for each queue.
-- ARGV: number of queues, note of each of them, expected fields, changes (see fields.lua).
if redis.call('EXISTS', KEYS[1]) == 0 then return false end
local at, ids = 5 + ARGV[4], {}
if not expected(at) then return {0, redis.call('HGETALL', KEYS[1])} end
for i = 1, tonumber(ARGV[4]) do
  local stream = KEYS[7 + i]
  if redis.call('EXISTS', stream) == 0 then redis.call('XGROUP', 'CREATE', stream, 'holders', '0', 'MKSTREAM') end
  ids[i] = redis.call('XADD', stream, '*', 'group', ARGV[1], 'note', ARGV[4 + i])
  redis.call('XREADGROUP', 'GROUP', 'holders', '-', 'STREAMS', stream, '>')
  claim(stream, ids[i], '-', MAX_LEASE_MS)
  local ttl_ms = ARGV[3] * 1000
  if ttl_ms > 0 then
    redis.call('XTRIM', stream, 'MINID', '~', string.format('%.0f', math.max(0, now_ms() - 2 * ttl_ms - MAX_LEASE_MS)))
  end
end
change(at + 1 + 2 * ARGV[at])
return {1, redis.call('HGETALL', KEYS[1]), unpack(ids)}
