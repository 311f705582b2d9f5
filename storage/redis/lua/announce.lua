-- The first bucket assigns the number of an announcement. Each other bucket applies the announcement if this number
-- is higher than its present number, so that all buckets have the same value in the end.
-- With the new number, processes that subscribed are woken; `pcall`, because a user may have no channels in its ACL.
-- KEYS: the announcements, which are the channel as well.
-- ARGV: name, value, number ('': assign one), the present number ('': any). Return -1 if the present number is another.
local current = tonumber(redis.call('HGET', KEYS[1], 'number:' .. ARGV[1]) or 0)
if ARGV[4] ~= '' and tonumber(ARGV[4]) ~= current then
  return -1
end
local number = ARGV[3] == '' and current + 1 or tonumber(ARGV[3])
if number > current then
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[2], 'number:' .. ARGV[1], number)
  if ARGV[3] == '' then redis.pcall('SPUBLISH', KEYS[1], ARGV[1]) end
end
return number
