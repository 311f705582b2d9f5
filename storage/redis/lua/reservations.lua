-- Who holds a place, and until when, is one field of text: `name=until_ms ` for each. A lease that is over is not
-- counted, so that the places of a process that died come free.
local function held_by_others(name)
  local kept, now = {}, now_ms()
  for holder, until_ms in string.gmatch(redis.call('HGET', KEYS[1], 'held') or '', '([^ =]+)=(%d+) ') do
    if holder ~= name and tonumber(until_ms) > now then kept[#kept + 1] = holder .. '=' .. until_ms .. ' ' end
  end
  return kept
end
local function hold(kept, name, lease_ms)
  if lease_ms > 0 then kept[#kept + 1] = name .. '=' .. string.format('%.0f', now_ms() + lease_ms) .. ' ' end
  if #kept > 0 then redis.call('HSET', KEYS[1], 'held', table.concat(kept)) else redis.call('HDEL', KEYS[1], 'held') end
end
