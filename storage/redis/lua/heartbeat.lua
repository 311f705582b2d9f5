-- Who has not beaten for a life is taken out, by the server's clock.
-- KEYS: the notices, the beats.
-- ARGV: name, life_ms (0: take it out), value.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local life, alive = tonumber(ARGV[2]), {}
if life == 0 then
  redis.call('HDEL', KEYS[2], ARGV[1])
else
  redis.call('HSET', KEYS[2], ARGV[1], string.format('%015.0f', now + life) .. ARGV[3])
  redis.call('PEXPIRE', KEYS[2], life)
end
local beats = redis.call('HGETALL', KEYS[2])
for i = 1, #beats, 2 do
  if tonumber(string.sub(beats[i + 1], 1, 15)) < now then
    redis.call('HDEL', KEYS[2], beats[i])
  else
    alive[#alive + 1] = beats[i]
    alive[#alive + 1] = string.sub(beats[i + 1], 16)
  end
end
return {redis.call('HGETALL', KEYS[1]), alive}
