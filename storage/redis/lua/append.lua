-- A record, its blocks, its position and its counts are stored together or not at all, and once; a place that was
-- held by its name is the record's now. A repeated append writes too (touch): only a write of this connection's own
-- makes WAIT and WAITAOF wait for what the lost first call wrote. If the life that was opened has expired, the
-- rollout is restored by its origin; if another life was opened since, that one gets the record. Where the field
-- `late_if` is there, the write that stores the record marks it as late: so whoever reads the rollout after that
-- field was set cannot take the record for one that came before.
-- KEYS: the seven, then the deleted.
-- ARGV: birth, name, record, how many blocks leant on, how many new ones, late_if ('': none), created_ms of the
-- origin ('': no origin is given), how many fields it has; then the names of the blocks leant on, name and bytes of
-- each new one, name and value of each field, and count, number, ....
-- Answers {position, is late, was restored}; {-1} for a deleted life; {-2} for one that expired; {-3, missing block,
-- ...}.
local birth = redis.call('HGET', KEYS[1], 'birth')
local is_restored = birth ~= ARGV[4] and 1 or 0
if is_restored == 1 then
  if was_deleted(ARGV[4]) then return {-1} end
  if ARGV[10] == '' then return {-2} end
end
local position = redis.call('HGET', KEYS[3], ARGV[5])
if not position then
  local first_block = 12 + ARGV[7]
  local first_field = first_block + 2 * ARGV[8]
  local first_count = first_field + 2 * ARGV[11]
  local missing = {-3}
  for i = 12, first_block - 1 do
    if redis.call('HEXISTS', KEYS[4], ARGV[i]) == 0 then missing[#missing + 1] = ARGV[i] end
  end
  if #missing > 1 then return missing end
  if not birth then
    redis.call('HSET', KEYS[1], 'birth', ARGV[4], 'created_ms', ARGV[10])
    for i = first_field, first_count - 1, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
    redis.call('ZADD', KEYS[6], 0, member())
    tell('')
  end
  for i = first_block, first_field - 1, 2 do redis.call('HSETNX', KEYS[4], ARGV[i], ARGV[i + 1]) end
  position = redis.call('RPUSH', KEYS[2], ARGV[6]) - 1
  redis.call('HSET', KEYS[3], ARGV[5], position)
  for i = first_count, #ARGV, 2 do redis.call('HINCRBY', KEYS[1], ARGV[i], ARGV[i + 1]) end
  if redis.call('HEXISTS', KEYS[1], 'held') == 1 then hold(held_by_others(ARGV[5]), ARGV[5], 0) end
  if ARGV[9] ~= '' and redis.call('HEXISTS', KEYS[1], 'f:' .. ARGV[9]) == 1 then
    redis.call('HSET', KEYS[5], 'late:' .. ARGV[5], '1')
    redis.call('HINCRBY', KEYS[1], 'n:late', 1)
  end
  tell(' ' .. position .. ' ' .. ARGV[5])
end
touch()
return {tonumber(position), redis.call('HEXISTS', KEYS[5], 'late:' .. ARGV[5]), is_restored}
