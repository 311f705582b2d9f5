-- A place is held for longer, or no more (lease_ms 0), by the life that was opened.
-- ARGV: birth, place, lease_ms.
if redis.call('HGET', KEYS[1], 'birth') == ARGV[4] then hold(held_by_others(ARGV[5]), ARGV[5], tonumber(ARGV[6])) end
return 0
