-- Return the position and the bytes of a record, both of the same incarnation.
-- ARGV: name.
local position = redis.call('HGET', KEYS[3], ARGV[4])
if not position then return false end
return {tonumber(position), redis.call('LINDEX', KEYS[2], position)}
