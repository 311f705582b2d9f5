-- All reservations of a rollout are in one field of text, `NAME=UNTIL_MS ` for each. Reservations with an expired
-- lease do not count, so a process that died releases its reservations.
local function reservations_of_others(name)
  local kept, now = {}, now_ms()
  for holder, until_ms in string.gmatch(redis.call('HGET', KEYS[1], 'held') or '', '([^ =]+)=(%d+) ') do
    if holder ~= name and tonumber(until_ms) > now then kept[#kept + 1] = holder .. '=' .. until_ms .. ' ' end
  end
  return kept
end
local function set_lease(kept, name, lease_ms)
  if lease_ms > 0 then kept[#kept + 1] = name .. '=' .. string.format('%.0f', now_ms() + lease_ms) .. ' ' end
  if #kept > 0 then redis.call('HSET', KEYS[1], 'held', table.concat(kept)) else redis.call('HDEL', KEYS[1], 'held') end
end
