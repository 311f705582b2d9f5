-- Many callers open one name at once: one birth, one set of fields, one entry in the listing. What is announced is
-- told along. A place is given while records and places held are fewer than the field `places` says: 1 or 0, or
-- nothing where there is no such field.
-- KEYS: the seven, then the notices.
-- ARGV: birth, place ('': none is wanted), lease_ms, then field, value, ....
if redis.call('HSETNX', KEYS[1], 'birth', ARGV[4]) == 1 then
  redis.call('HSET', KEYS[1], 'created_ms', ARGV[2])
  for i = 7, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
  redis.call('ZADD', KEYS[6], 0, member())
  tell('')
end
touch()
local places, given = ARGV[5] ~= '' and redis.call('HGET', KEYS[1], 'f:places'), false
if places then
  local kept = held_by_others(ARGV[5])
  given = redis.call('LLEN', KEYS[2]) + #kept < tonumber(places) and 1 or 0
  if given == 1 then hold(kept, ARGV[5], tonumber(ARGV[6])) end
end
return {redis.call('HGETALL', KEYS[1]), redis.call('HGETALL', KEYS[8]), given}
