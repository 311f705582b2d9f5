-- A mark goes where the record that it is about went, and must not outlive it.
-- KEYS: the seven, then the deleted.
-- ARGV: birth, then mark, value, ....
local birth = redis.call('HGET', KEYS[1], 'birth')
if not birth or (birth ~= ARGV[4] and was_deleted(ARGV[4])) then return -1 end
for i = 5, #ARGV, 2 do redis.call('HSET', KEYS[5], ARGV[i], ARGV[i + 1]) end
touch()
tell('')
return 0
