-- Remove expired members from the listing, from the expiry set, and from the index, whatever their values were. The server's
-- clock decides, as for the expiry of keys.
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
local function prune(listing, expiry, limit)
  local expired = redis.call('ZRANGE', expiry, '-inf', now_ms(), 'BYSCORE', 'LIMIT', 0, limit)
  if #expired == 0 then return 0 end
  redis.call('ZREM', listing, unpack(expired))
  redis.call('ZREM', expiry, unpack(expired))
  index().forget(expired)
  return #expired
end
