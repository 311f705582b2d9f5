-- Return members of the listing, or entries of the index, without expired ones. With a value, also return whether each
-- member of the listing has an entry: processes of 0.1.0 write none.
-- KEYS: listing, expiry, index.
-- ARGV: newest and oldest member or entry (as ZRANGE BYLEX requires), limit; for entries `FIELD=` of a field that all have.
while prune(KEYS[1], KEYS[2], 1000) == 1000 do end
local found = redis.call('ZRANGE', KEYS[ARGV[4] and 3 or 1], ARGV[1], ARGV[2], 'BYLEX', 'REV', 'LIMIT', 0, ARGV[3])
if not ARGV[4] then return found end
local count = redis.call('ZLEXCOUNT', KEYS[3], '[' .. ARGV[4], '(' .. ARGV[4] .. '\255')
return {found, redis.call('ZCARD', KEYS[1]) == count and 1 or 0}
