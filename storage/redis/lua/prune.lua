-- Members whose time has come leave both sets together. The server's clock decides, as it does over the keys' expiry.
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
local function prune(listing, expiry, limit)
  local dead = redis.call('ZRANGE', expiry, '-inf', now_ms(), 'BYSCORE', 'LIMIT', 0, limit)
  for _, member in ipairs(dead) do
    redis.call('ZREM', listing, member)
    redis.call('ZREM', expiry, member)
  end
  return #dead
end
