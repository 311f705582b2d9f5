-- Delete all keys of a rollout and its member of the listing in one transaction. With a TTL, keep the incarnation for
-- a while, because a late append would restore the rollout otherwise.
-- KEYS: the seven keys of the rollout, the deleted incarnations, the timers, the index.
-- ARGV: the expected touched_ms, if a rollout that was touched since must remain.
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
if ARGV[4] and redis.call('HGET', KEYS[1], 'touched_ms') ~= ARGV[4] then return 0 end
local incarnation, kept_ms = redis.call('HGET', KEYS[1], 'birth') or '', ARGV[3] * 1000
if kept_ms > 0 then
  kept_ms = math.max(kept_ms, 86400000)
  redis.call('ZREMRANGEBYSCORE', KEYS[8], '-inf', now_ms())
  redis.call('ZADD', KEYS[8], now_ms() + kept_ms, incarnation)
  redis.call('PEXPIRE', KEYS[8], kept_ms)
end
redis.call('ZREM', KEYS[9], ARGV[1] .. ' ' .. incarnation)
redis.call('ZREM', KEYS[7], member())
redis.call('ZREM', KEYS[6], member())
index().remove(index().entries(KEYS[1], member()))
redis.call('UNLINK', KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5])
publish('')
return 1
