-- Restart the lifetime of a rollout. Its only other change is `touched_ms`, unless now_ms is 0.
-- ARGV: incarnation ('': any).
local incarnation = redis.call('HGET', KEYS[1], 'birth')
if not incarnation or (ARGV[4] ~= '' and ARGV[4] ~= incarnation) then return 0 end
if ARGV[2] == '0' then renew() else touch() end
return 1
