-- The lifetime begins anew, and nothing else changes.
-- ARGV: birth ('': of any life).
local birth = redis.call('HGET', KEYS[1], 'birth')
if not birth or (ARGV[4] ~= '' and ARGV[4] ~= birth) then return 0 end
renew()
return 1
