-- Note in the index of a queue where entries are. Claims that wait are notified of available ones; `pcall`, because a user may
-- have no channels in its ACL.
-- KEYS: the index: available (and the channel), leased, notes.
-- ARGV: for each entry: its ID and group, where the index has it now ('*': anywhere, '': nowhere, '0': available, else the end
-- of its lease), for how many ms it is leased (0: it is available, '': it is gone), its note after '=' ('': unchanged).
local time = redis.call('TIME')
local now, is_any_available = time[1] * 1000 + math.floor(time[2] / 1000), false
for i = 1, #ARGV, 4 do
  local entry, lease_ms = ARGV[i], ARGV[i + 2]
  local place = redis.call('ZSCORE', KEYS[1], entry) and '0' or redis.call('ZSCORE', KEYS[2], entry) or ''
  if ARGV[i + 1] == '*' or ARGV[i + 1] == place then
    if place == '0' then redis.call('ZREM', KEYS[1], entry) elseif place ~= '' then redis.call('ZREM', KEYS[2], entry) end
    if lease_ms == '' then redis.call('HDEL', KEYS[3], entry)
    elseif lease_ms == '0' then
      redis.call('ZADD', KEYS[1], string.match(entry, '^%d+'), entry)
      is_any_available = true
    else redis.call('ZADD', KEYS[2], now + lease_ms, entry) end
    if ARGV[i + 3] ~= '' then redis.call('HSET', KEYS[3], entry, ARGV[i + 3]) end
  end
end
if is_any_available then redis.pcall('SPUBLISH', KEYS[1], '') end
return 0
