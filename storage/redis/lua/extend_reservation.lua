-- Set the lease of a reservation, or release it (lease_ms 0), if the rollout still has this incarnation.
-- ARGV: incarnation, name of the reservation, lease_ms.
if redis.call('HGET', KEYS[1], 'birth') == ARGV[4] then set_lease(reservations_of_others(ARGV[5]), ARGV[5], tonumber(ARGV[6])) end
return 0
