-- Remove expired members from the listing and from the expiry set. The server's clock decides, as for the expiry of
-- keys.
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
local function prune(listing, expiry, limit)
  local expired = redis.call('ZRANGE', expiry, '-inf', now_ms(), 'BYSCORE', 'LIMIT', 0, limit)
  for _, member in ipairs(expired) do
    redis.call('ZREM', listing, member)
    redis.call('ZREM', expiry, member)
  end
  return #expired
end
