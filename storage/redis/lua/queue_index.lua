-- Return entries of the index of a queue and where they are: entry, '0' (available) or the end of its lease, ...
-- KEYS: the index: available, leased.
-- ARGV: how many of each to skip, how many of each to return.
local last, found = ARGV[1] + ARGV[2] - 1, {}
for _, entry in ipairs(redis.call('ZRANGE', KEYS[1], ARGV[1], last)) do
  found[#found + 1] = entry
  found[#found + 1] = '0'
end
for _, part in ipairs(redis.call('ZRANGE', KEYS[2], ARGV[1], last, 'WITHSCORES')) do found[#found + 1] = part end
return found
