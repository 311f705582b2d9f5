-- Return 1 to the first caller, and 0 to all others until this time has passed.
-- KEYS: the turn.
-- ARGV: ms.
return redis.call('SET', KEYS[1], '1', 'NX', 'PX', ARGV[1]) and 1 or 0
