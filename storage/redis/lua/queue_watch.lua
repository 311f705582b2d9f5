-- Note until when a holder has to extend its leases, by the server's clock.
-- KEYS: the holders of a consumer that are watched.
-- ARGV: the holder, for how many ms ('': it is watched no more), the maximum lease in ms.
if ARGV[2] == '' then return redis.call('ZREM', KEYS[1], ARGV[1]) end
local time = redis.call('TIME')
redis.call('ZADD', KEYS[1], time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[2], ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
