-- All keys and the entry in the listing go at once: nobody may append to, or list, half a rollout. Where rollouts
-- expire, the birth is kept for a while: else a late append would restore the rollout.
-- KEYS: the seven, then the deleted.
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
local kept_ms = ARGV[3] * 1000
if kept_ms > 0 then
  kept_ms = math.max(kept_ms, 86400000)
  redis.call('ZREMRANGEBYSCORE', KEYS[8], '-inf', now_ms())
  redis.call('ZADD', KEYS[8], now_ms() + kept_ms, redis.call('HGET', KEYS[1], 'birth'))
  redis.call('PEXPIRE', KEYS[8], kept_ms)
end
redis.call('ZREM', KEYS[7], member())
redis.call('ZREM', KEYS[6], member())
redis.call('UNLINK', KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5])
tell('')
return 1
