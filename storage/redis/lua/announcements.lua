-- All that is announced.
-- KEYS: the notices.
return redis.call('HGETALL', KEYS[1])
