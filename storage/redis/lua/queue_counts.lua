-- Return the number of entries of a bucket that have no holder, the number of those that have one, and the age in ms of the
-- oldest entry that was released or never claimed (0: none). The cost grows with the number of holders and of their entries.
-- KEYS: the stream.
if redis.call('EXISTS', KEYS[1]) == 0 then return {0, 0, 0} end
local free, held = 0, 0
for _, facts in ipairs(consumers(KEYS[1])) do
  local idle = 0
  if facts['name'] == '-' then idle = facts['pending']
  elseif facts['pending'] > 0 then
    local range = {'IDLE', MAX_LEASE_MS, '-', '+', facts['pending'], facts['name']}
    idle = #redis.call('XPENDING', KEYS[1], 'holders', unpack(range))
  end
  free, held = free + idle, held + facts['pending'] - idle
end
local oldest = redis.call('XPENDING', KEYS[1], 'holders', '-', '+', 1, '-')[1]
return {free, held, oldest and math.max(0, now_ms() - string.match(oldest[1], '^%d+')) or 0}
