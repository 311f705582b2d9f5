-- Take or keep a role that one process has at a time, until its lifetime ends. Return whether this process has it.
-- KEYS: the role.
-- ARGV: name of the process, lifetime_ms (0: give it up).
local leader = redis.call('GET', KEYS[1])
if leader and leader ~= ARGV[1] then return 0 end
if ARGV[2] == '0' then redis.call('DEL', KEYS[1]) else redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2]) end
return 1
