-- Set marks. They go to the incarnation that has the record, and must not exist without the rollout.
-- KEYS: the seven keys of the rollout, the deleted incarnations, the index.
-- ARGV: incarnation, then mark, value, ...
local incarnation = redis.call('HGET', KEYS[1], 'birth')
if not incarnation or (incarnation ~= ARGV[4] and was_deleted(ARGV[4])) then return -1 end
for i = 5, #ARGV, 2 do redis.call('HSET', KEYS[5], ARGV[i], ARGV[i + 1]) end
touch()
publish('')
return 0
