-- Note what a process knows and does, for each of its policies: the number of the latest pause that it knows, and its calls in
-- flight. Both are counted over all processes by difference, so that the cost does not grow with their number. A process
-- without a heartbeat within its lifetime, by the server's clock, is not counted any more.
-- Return the sum of the numbers of all announcements, which each announcement increases; the announcements if it is another
-- than the caller knows; and for each policy all calls in flight, and how many processes know an older pause only.
-- Processes of 0.1.0 send heartbeats to KEYS[2], and read all. So that both kinds wait for each other, those in KEYS[2] are
-- added here, and the sums of the others are an entry there, as if they were one process: its name is `~`, or `~:POLICY`. It is
-- written if it has changed, or once a tenth of its lifetime has passed.
-- KEYS: the announcements, the heartbeats of 0.1.0, the processes, the ends of their lifetimes, the counts.
-- ARGV: name, lifetime_ms (0: the process ends), the sum that the caller knows, then policy, number, calls, ...
local time = redis.call('TIME')
local now, lifetime_ms = time[1] * 1000 + math.floor(time[2] / 1000), tonumber(ARGV[2])
local is_damaged, is_changed = false, false
local function add(changes, text, sign)
  for policy, number, calls in string.gmatch(text, '(%S+) (%d+) (%-?%d+) ') do
    for field, by in pairs({['calls ' .. policy] = sign * calls, [number .. ' ' .. policy] = sign}) do
      changes[field] = (changes[field] or 0) + by
    end
  end
end
local function count(changes)
  for field, by in pairs(changes) do
    local sum = by ~= 0 and redis.pcall('HINCRBY', KEYS[5], field, by)
    if sum == 0 then redis.call('HDEL', KEYS[5], field) elseif sum and (type(sum) == 'table' or sum < 0) then is_damaged = true end
  end
end
local function note(process, after)
  local before = redis.call('HGET', KEYS[3], process) or ''
  if before == after then return end
  is_changed = true
  local changes = {}
  add(changes, before, -1)
  add(changes, after, 1)
  count(changes)
  if after == '' then redis.call('HDEL', KEYS[3], process) else redis.call('HSET', KEYS[3], process, after) end
end
for _, dead in ipairs(redis.call('ZRANGE', KEYS[4], '-inf', '(' .. now, 'BYSCORE', 'LIMIT', 0, 100)) do
  note(dead, '')
  redis.call('ZREM', KEYS[4], dead)
end
if lifetime_ms == 0 then
  note(ARGV[1], '')
  redis.call('ZREM', KEYS[4], ARGV[1])
else
  note(ARGV[1], #ARGV > 3 and table.concat(ARGV, ' ', 4) .. ' ' or '')
  redis.call('ZADD', KEYS[4], now + lifetime_ms, ARGV[1])
  for i = 3, 5 do redis.call('PEXPIRE', KEYS[i], lifetime_ms) end
end

local calls, oldest, unaware, wanted
local function seen(policy, number, processes)
  if number < (wanted[policy] or 0) then unaware[policy] = (unaware[policy] or 0) + processes end
end
local function read()
  calls, oldest, unaware, wanted = {}, {}, {}, {}
  for i = 4, #ARGV, 3 do wanted[ARGV[i]] = tonumber(ARGV[i + 1]) end
  local counts = redis.call('HGETALL', KEYS[5])
  for i = 1, #counts, 2 do
    local kind, policy = string.match(counts[i], '^(%w+) (.+)$')
    local number, value = tonumber(kind), tonumber(counts[i + 1])
    if not value or not (number or kind == 'calls') then return false end
    if kind == 'calls' then calls[policy] = value
    else
      oldest[policy] = math.min(oldest[policy] or number, number)
      seen(policy, number, value)
    end
  end
  return #counts > 0 or lifetime_ms == 0
end
if is_damaged or not read() then  -- count again
  redis.call('DEL', KEYS[5])
  is_changed = true
  local all = {}
  for i, text in ipairs(redis.call('HVALS', KEYS[3])) do add(all, text, 1) end
  count(all)
  redis.call('PEXPIRE', KEYS[5], math.max(1, lifetime_ms))
  read()
end
local last = tonumber(redis.call('ZRANGE', KEYS[4], 0, 0, 'REV', 'WITHSCORES')[2] or 0)
local is_fresh = not is_changed and (tonumber(string.sub(redis.call('HGET', KEYS[2], '~') or '', 1, 15)) or 0) > last - lifetime_ms / 10
for _, name in ipairs(redis.call('HKEYS', KEYS[2])) do is_fresh = is_fresh and string.byte(name) == 126 end
if not is_fresh then
  local older = redis.call('HGETALL', KEYS[2])
  local sums, written = {}, {}
  for policy, number in pairs(oldest) do
    sums[policy == 'default' and '~' or '~:' .. policy] = string.format('[%d,%d]', number, calls[policy] or 0)
  end
  for i = 1, #older, 2 do
    local name, ends, value = older[i], tonumber(string.sub(older[i + 1], 1, 15)) or 0, string.sub(older[i + 1], 16)
    if sums[name] then
      if sums[name] == value and ends > last - lifetime_ms / 10 then sums[name] = nil end  -- written lately
    elseif string.sub(name, 1, 1) == '~' or ends < now then redis.call('HDEL', KEYS[2], name)
    else
      local policy, number, in_flight = string.match(name, ':(.+)$') or 'default', string.match(value, '^%[(%d+),(%-?%d+)%]$')
      if number then
        seen(policy, tonumber(number), 1)
        calls[policy] = (calls[policy] or 0) + in_flight
      end
    end
  end
  for name, value in pairs(sums) do
    written[#written + 1] = name
    written[#written + 1] = string.format('%015.0f', last) .. value
  end
  if #written > 0 then
    redis.call('HSET', KEYS[2], unpack(written))
    if redis.call('PEXPIRETIME', KEYS[2]) < last then redis.call('PEXPIREAT', KEYS[2], last) end
  end
end

local reply, announced, sum = {}, redis.call('HGETALL', KEYS[1]), 0
for i = 1, #announced, 2 do
  if string.sub(announced[i], 1, 7) == 'number:' then sum = sum + (tonumber(announced[i + 1]) or 0) end
end
for i = 4, #ARGV, 3 do
  reply[#reply + 1] = calls[ARGV[i]] or 0
  reply[#reply + 1] = unaware[ARGV[i]] or 0
end
return {sum, sum ~= tonumber(ARGV[3]) and announced, reply}
