-- Restart the lifetime of a rollout without any other change.
-- ARGV: incarnation ('': any).
local incarnation = redis.call('HGET', KEYS[1], 'birth')
if not incarnation or (ARGV[4] ~= '' and ARGV[4] ~= incarnation) then return 0 end
renew()
return 1
