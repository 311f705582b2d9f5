-- Return all announcements.
-- KEYS: the announcements.
return redis.call('HGETALL', KEYS[1])
