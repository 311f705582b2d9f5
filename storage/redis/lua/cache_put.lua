-- Set a value of the cache, and remove values that have expired, and the oldest ones if the cache is full.
-- KEYS: the values, their expiry times, their total size.
-- ARGV: name, value, lifetime_ms, the maximum total size in bytes.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local lifetime_ms, limit = tonumber(ARGV[3]), tonumber(ARGV[4])
local total = tonumber(redis.call('GET', KEYS[3]) or 0) or 0
local function remove(name)
  total = total - redis.call('HSTRLEN', KEYS[1], name)
  redis.call('HDEL', KEYS[1], name)
  redis.call('ZREM', KEYS[2], name)
end
remove(ARGV[1])
local size = 15 + #ARGV[2]
if size <= limit then
  for _, name in ipairs(redis.call('ZRANGE', KEYS[2], '-inf', now, 'BYSCORE', 'LIMIT', 0, 100)) do remove(name) end
  while total + size > limit do
    local oldest = redis.call('ZRANGE', KEYS[2], 0, 0)
    if #oldest == 0 then
      total = 0
      redis.call('DEL', KEYS[1])
      break
    end
    remove(oldest[1])
  end
  redis.call('HSET', KEYS[1], ARGV[1], string.format('%015.0f', now + lifetime_ms) .. ARGV[2])
  redis.call('ZADD', KEYS[2], now + lifetime_ms, ARGV[1])
  total = total + size
end
redis.call('SET', KEYS[3], string.format('%.0f', total))
for _, key in ipairs(KEYS) do
  if redis.call('PTTL', key) < lifetime_ms then redis.call('PEXPIRE', key, lifetime_ms) end
end
return total
