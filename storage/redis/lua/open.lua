-- Open a rollout, or create it with one incarnation, one set of fields and one member of the listing, if several
-- callers open it at the same time. Return its hash, the announcements, and whether a reservation was made: 1 or 0,
-- or nil if the rollout has no field `places` (its limit on records and reservations) or none is requested.
-- KEYS: the seven keys of the rollout, the announcements; for a rollout with a timer the timers; the index.
-- ARGV: incarnation, name of the reservation ('': none), lease_ms, then field, value, ...; for a rollout with a timer
-- its time.
if redis.call('HSETNX', KEYS[1], 'birth', ARGV[4]) == 1 then
  redis.call('HSET', KEYS[1], 'created_ms', ARGV[2])
  for i = 7, #ARGV - 1, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
  if KEYS[10] then redis.call('ZADD', KEYS[9], ARGV[#ARGV], ARGV[1] .. ' ' .. ARGV[4]) end
  local new = member()
  redis.call('ZADD', KEYS[6], 0, new)
  index().add(KEYS[1], new)
  publish('')
end
touch()
local limit, has_reservation = ARGV[5] ~= '' and redis.call('HGET', KEYS[1], 'f:places'), false
if limit then
  local kept = reservations_of_others(ARGV[5])
  has_reservation = redis.call('LLEN', KEYS[2]) + #kept < (tonumber(limit) or 0) and 1 or 0
  if has_reservation == 1 then set_lease(kept, ARGV[5], tonumber(ARGV[6])) end
end
return {redis.call('HGETALL', KEYS[1]), redis.call('HGETALL', KEYS[8]), has_reservation}
