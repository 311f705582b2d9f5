-- The first bucket numbers what is announced; the others take over what has a higher number than what they have: so
-- all agree in the end, whoever else announces meanwhile.
-- KEYS: the notices.
-- ARGV: name, value, number ('' to be given one).
local had = tonumber(redis.call('HGET', KEYS[1], 'number:' .. ARGV[1]) or 0)
local number = ARGV[3] == '' and had + 1 or tonumber(ARGV[3])
if number > had then
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[2], 'number:' .. ARGV[1], number)
end
return number
