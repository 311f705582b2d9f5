-- Each write adds at most one member and removes up to ten expired ones, so that expired members do not accumulate.
-- Changes are published with `pcall`, so that users without channels in their ACL can write as well.
local function member()
  return string.format('%015d', tonumber(redis.call('HGET', KEYS[1], 'created_ms')) or 0) .. ARGV[1]
end
local function renew()
  local ttl_ms = ARGV[3] * 1000
  if ttl_ms > 0 then
    redis.call('ZADD', KEYS[7], now_ms() + ttl_ms, member())
    for i = 1, 7 do redis.call('PEXPIRE', KEYS[i], ttl_ms) end
    if HAS_INDEX then redis.call('PEXPIRE', KEYS[#KEYS], ttl_ms) end
    prune(KEYS[6], KEYS[7], 10)
  end
end
local function touch()
  redis.call('HSET', KEYS[1], 'touched_ms', ARGV[2])
  renew()
end
local function publish(record)
  redis.pcall('SPUBLISH', KEYS[6], ARGV[1] .. record)
end
