-- Return what a claim needs to choose: the announcements; entries that the index lists as available, longest waiting first,
-- each followed by its note; how many are available and how many leased; the age in ms of the oldest available one (0: none);
-- whether the caller has to compare the index with the streams: 0, 1, or 2 if nobody has compared it yet; and the holders of the
-- consumer that have not extended their leases in time.
-- KEYS: the announcements, then the index: available, leased, notes, the time of the last comparison; of a consumer, its holders
-- that are watched.
-- ARGV: how many entries to skip, how many to return, the interval in ms between comparisons.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for _, entry in ipairs(redis.call('ZRANGE', KEYS[3], '-inf', now, 'BYSCORE', 'LIMIT', 0, 1000)) do
  redis.call('ZREM', KEYS[3], entry)
  redis.call('ZADD', KEYS[2], string.match(entry, '^%d+'), entry)
end
local found = {}
local entries = tonumber(ARGV[2]) > 0 and redis.call('ZRANGE', KEYS[2], ARGV[1], ARGV[1] + ARGV[2] - 1) or {}
for i = 1, #entries, 100 do
  local names = {unpack(entries, i, math.min(i + 99, #entries))}
  for j, note in ipairs(redis.call('HMGET', KEYS[4], unpack(names))) do
    if note then
      found[#found + 1] = names[j]
      found[#found + 1] = string.sub(note, 2)
    else redis.call('ZREM', KEYS[2], names[j]) end
  end
end
local oldest = redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')[2]
local compared = redis.call('GET', KEYS[5])
local is_due = not compared and 2 or now - compared >= tonumber(ARGV[3]) and 1 or 0
if is_due > 0 then redis.call('SET', KEYS[5], now) end
local counts = {redis.call('ZCARD', KEYS[2]), redis.call('ZCARD', KEYS[3])}
local overdue = KEYS[6] and redis.call('ZRANGE', KEYS[6], '-inf', now, 'BYSCORE', 'LIMIT', 0, 100) or {}
local age = oldest and math.max(0, now - oldest) or 0
return {redis.call('HGETALL', KEYS[1]), found, counts[1], counts[2], age, is_due, overdue}
