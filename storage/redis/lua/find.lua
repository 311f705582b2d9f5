-- Position and record must be of one life of the rollout.
-- ARGV: name.
local position = redis.call('HGET', KEYS[3], ARGV[4])
if not position then return false end
return {tonumber(position), redis.call('LINDEX', KEYS[2], position)}
