-- Return members of the listing, without expired ones.
-- KEYS: listing, expiry.
-- ARGV: newest and oldest member (as ZRANGE BYLEX requires), limit.
while prune(KEYS[1], KEYS[2], 1000) == 1000 do end
return redis.call('ZRANGE', KEYS[1], ARGV[1], ARGV[2], 'BYLEX', 'REV', 'LIMIT', 0, ARGV[3])
