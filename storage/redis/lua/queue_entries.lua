-- Return the last ID if there may be more ('': there are none), and entries of a bucket from an ID on: ID, group, note, for
-- how many ms it is leased (0: it is available), ... Entries that were trimmed from the stream are removed from its group.
-- KEYS: the stream.
-- ARGV: the ID, how many.
if redis.call('EXISTS', KEYS[1]) == 0 then return {'', {}} end
local entries, found = {}, {}
local pending = redis.call('XPENDING', KEYS[1], 'holders', ARGV[1], '+', ARGV[2])
if #pending == 0 then return {'', {}} end
for _, entry in ipairs(redis.call('XRANGE', KEYS[1], pending[1][1], pending[#pending][1])) do entries[entry[1]] = entry[2] end
for _, held in ipairs(pending) do
  local entry = entries[held[1]]
  if not entry then redis.call('XACK', KEYS[1], 'holders', held[1])
  else
    local left_ms = held[2] == '-' and 0 or math.max(0, MAX_LEASE_MS - held[3])
    local group, note = entry[1] == 'group' and entry[2] or '', entry[3] == 'note' and entry[4] or ''
    for _, part in ipairs({held[1], group, note, left_ms}) do found[#found + 1] = part end
  end
end
return {#pending == tonumber(ARGV[2]) and pending[#pending][1] or '', found}
