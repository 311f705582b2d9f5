-- Add a group to the queue. With a TTL, trim entries of groups that must have expired.
-- ARGV: note, expected fields, changes (see fields.lua).
if redis.call('EXISTS', KEYS[1]) == 0 then return false end
if not expected(5) then return {0, redis.call('HGETALL', KEYS[1])} end
if redis.call('EXISTS', KEYS[8]) == 0 then redis.call('XGROUP', 'CREATE', KEYS[8], 'holders', '0', 'MKSTREAM') end
local entry_id = redis.call('XADD', KEYS[8], '*', 'group', ARGV[1], 'note', ARGV[4])
redis.call('XREADGROUP', 'GROUP', 'holders', '-', 'STREAMS', KEYS[8], '>')
claim(KEYS[8], entry_id, '-', MAX_LEASE_MS)
local ttl_ms = ARGV[3] * 1000
if ttl_ms > 0 then
  redis.call('XTRIM', KEYS[8], 'MINID', '~', string.format('%.0f', math.max(0, now_ms() - 2 * ttl_ms - MAX_LEASE_MS)))
end
change(6 + 2 * ARGV[5])
return {1, redis.call('HGETALL', KEYS[1])}
