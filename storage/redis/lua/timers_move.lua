-- Set timers to new times, except those that another caller has set meanwhile.
-- KEYS: the timers.
-- ARGV: the time at which they must be ('': any), then timer, new time ('': remove it), ...
for i = 2, #ARGV, 2 do
  local time = redis.call('ZSCORE', KEYS[1], ARGV[i])
  if time and (ARGV[1] == '' or tonumber(time) == tonumber(ARGV[1])) then
    if ARGV[i + 1] == '' then redis.call('ZREM', KEYS[1], ARGV[i])
    else redis.call('ZADD', KEYS[1], ARGV[i + 1], ARGV[i]) end
  end
end
return 0
