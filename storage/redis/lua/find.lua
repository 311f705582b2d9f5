-- Return the position and the bytes of a record, both of the same incarnation.
-- ARGV: name.
local position = string.match(redis.call('HGET', KEYS[3], ARGV[4]) or '', '^%d%d?%d?%d?%d?%d?%d?%d?%d?$')
if not position then return false end
return {tonumber(position), redis.call('LINDEX', KEYS[2], position)}
