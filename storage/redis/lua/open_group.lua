-- Create a group and all its rollouts in one transaction. A group that exists is not changed.
-- KEYS: the seven keys of the group, then the seven keys of each rollout, then the timers and the index.
-- ARGV: now_ms, ttl_s, number of entities, time of the timer of each rollout ('': none), then for each entity: encoded
-- name, incarnation, number of fields, field, value, ...
if redis.call('EXISTS', KEYS[1]) == 0 then
  local ttl_ms, at = ARGV[2] * 1000, 5
  for first = 0, (ARGV[3] - 1) * 7, 7 do
    local name, incarnation, fields = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2])
    local member = string.format('%015d', ARGV[1]) .. name
    if redis.call('HSETNX', KEYS[first + 1], 'birth', incarnation) == 1 then
      redis.call('HSET', KEYS[first + 1], 'created_ms', ARGV[1], 'touched_ms', ARGV[1])
      for i = at + 3, at + 1 + 2 * fields, 2 do redis.call('HSET', KEYS[first + 1], ARGV[i], ARGV[i + 1]) end
      redis.call('ZADD', KEYS[first + 6], 0, member)
      if first > 0 then index().add(KEYS[first + 1], member) end
      if ttl_ms > 0 then
        redis.call('ZADD', KEYS[first + 7], now_ms() + ttl_ms, member)
        for i = first + 1, first + 7 do redis.call('PEXPIRE', KEYS[i], ttl_ms) end
        if HAS_INDEX then redis.call('PEXPIRE', KEYS[#KEYS], ttl_ms) end
      end
      if first > 0 and ARGV[4] ~= '' then redis.call('ZADD', KEYS[#KEYS - 1], ARGV[4], name .. ' ' .. incarnation) end
      redis.pcall('SPUBLISH', KEYS[first + 6], name)
    end
    at = at + 3 + 2 * fields
  end
end
return redis.call('HGETALL', KEYS[1])
