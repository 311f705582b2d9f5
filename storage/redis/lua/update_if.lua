-- Compare and set. ARGV: expected fields, then changes (see fields.lua).
if redis.call('EXISTS', KEYS[1]) == 0 then return false end
if not expected(4) then return {0, redis.call('HGETALL', KEYS[1])} end
change(5 + 2 * ARGV[4])
return {1, redis.call('HGETALL', KEYS[1])}
