-- Return the entries of a bucket that have no holder, oldest first.
-- KEYS: the stream.
-- ARGV: limit.
if redis.call('EXISTS', KEYS[1]) == 0 then return {} end
local found = {}
for _, pending in ipairs(redis.call('XPENDING', KEYS[1], 'holders', 'IDLE', MAX_LEASE_MS, '-', '+', ARGV[1])) do
  local entry = redis.call('XRANGE', KEYS[1], pending[1], pending[1])[1]
  if entry then found[#found + 1] = {entry[1], entry[2][2], entry[2][4]}
  else redis.call('XACK', KEYS[1], 'holders', pending[1]) end
end
return found
