-- Set a heartbeat and remove expired ones, by the server's clock. Return all announcements and heartbeats.
-- KEYS: the announcements, the heartbeats.
-- ARGV: name, lifetime_ms (0: remove the heartbeat), value.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local lifetime_ms, active = tonumber(ARGV[2]), {}
if lifetime_ms == 0 then
  redis.call('HDEL', KEYS[2], ARGV[1])
else
  redis.call('HSET', KEYS[2], ARGV[1], string.format('%015.0f', now + lifetime_ms) .. ARGV[3])
  redis.call('PEXPIRE', KEYS[2], lifetime_ms)
end
local heartbeats = redis.call('HGETALL', KEYS[2])
for i = 1, #heartbeats, 2 do
  if (tonumber(string.sub(heartbeats[i + 1], 1, 15)) or 0) < now then
    redis.call('HDEL', KEYS[2], heartbeats[i])
  else
    active[#active + 1] = heartbeats[i]
    active[#active + 1] = string.sub(heartbeats[i + 1], 16)
  end
end
return {redis.call('HGETALL', KEYS[1]), active}
