-- Return whether members of the listing have no entry in the index, or entries no member.
-- KEYS: listing, index.
-- ARGV: `FIELD=` of a field that all have.
local count = redis.call('ZLEXCOUNT', KEYS[2], '[' .. ARGV[1], '(' .. ARGV[1] .. '\255')
return redis.call('ZCARD', KEYS[1]) ~= count and 1 or 0
