-- With a ttl, entries of groups that must long be gone are cut off.
-- ARGV: note, expectations, changes.
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
