-- Note until when a holder has to extend its leases, by the server's clock, and return those of its consumer that have not.
-- KEYS: the holders of a consumer that are watched.
-- ARGV: the holder ('': none), for how many ms ('': it is watched no more), the maximum lease in ms.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if ARGV[2] == '' then redis.call('ZREM', KEYS[1], ARGV[1])
else
  redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
end
return redis.call('ZRANGE', KEYS[1], '-inf', now, 'BYSCORE', 'LIMIT', 0, 100)
