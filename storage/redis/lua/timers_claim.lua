-- Return expired timers of a bucket, and set each to a later time, so that no other claim returns it before.
-- KEYS: the timers.
-- ARGV: now_ms, the later time, limit.
local expired = redis.call('ZRANGE', KEYS[1], '-inf', ARGV[1], 'BYSCORE', 'LIMIT', 0, ARGV[3])
for _, timer in ipairs(expired) do redis.call('ZADD', KEYS[1], ARGV[2], timer) end
return expired
