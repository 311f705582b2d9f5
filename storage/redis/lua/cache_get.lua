-- Return a value of the cache, or nothing if it has expired.
-- KEYS: the values.
-- ARGV: name.
local time = redis.call('TIME')
local value = redis.call('HGET', KEYS[1], ARGV[1])
if not value or (tonumber(string.sub(value, 1, 15)) or 0) <= time[1] * 1000 + math.floor(time[2] / 1000) then return false end
return string.sub(value, 16)
