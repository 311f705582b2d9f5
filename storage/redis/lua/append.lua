-- Store a record with its blocks, its position and its counts once, in one transaction. The record uses up the
-- reservation with its name. A repeated append also writes (`touch`), because WAIT and WAITAOF wait only for writes
-- of the same connection, and the first response may have been lost. If the rollout has expired, it is restored by
-- its origin, with a timer that has expired; if it was opened again since, the record is added to the new incarnation. If the rollout has the field
-- `late_if`, the record is marked as late in the same transaction, so that a reader who sees that field cannot take
-- the record for an earlier one.
-- KEYS: the seven keys of the rollout, the deleted incarnations; with an origin the timers; the index.
-- ARGV: incarnation, name, record, number of required blocks, number of new blocks, late_if ('': none), created_ms of
-- the origin ('': no origin), number of its fields; then the names of the required blocks, name and bytes of each new
-- block, name and value of each field, and count, number, ..., field that is set unless the rollout has it, value, ...
-- Returns {position, is late, was restored, is new}; {-1} if the rollout was deleted; {-2} if it has expired; {-3, missing
-- block, ...}.
local incarnation = redis.call('HGET', KEYS[1], 'birth')
local is_restored = incarnation ~= ARGV[4] and 1 or 0
if is_restored == 1 then
  if was_deleted(ARGV[4]) then return {-1} end
  if ARGV[10] == '' then return {-2} end
end
local position = redis.call('HGET', KEYS[3], ARGV[5])
local is_new = position and 0 or 1
if is_new == 1 then
  local first_block = 12 + ARGV[7]
  local first_field = first_block + 2 * ARGV[8]
  local first_count = first_field + 2 * ARGV[11]
  local missing = {-3}
  for i = 12, first_block - 1 do
    if redis.call('HEXISTS', KEYS[4], ARGV[i]) == 0 then missing[#missing + 1] = ARGV[i] end
  end
  if #missing > 1 then return missing end
  if not incarnation then
    redis.call('HSET', KEYS[1], 'birth', ARGV[4], 'created_ms', ARGV[10])
    for i = first_field, first_count - 1, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
    redis.call('ZADD', KEYS[6], 0, member())
    index().forget({member()})
    index().add(KEYS[1], member())
    redis.call('ZADD', KEYS[9], 0, ARGV[1] .. ' ' .. ARGV[4])
    publish('')
  end
  for i = first_block, first_field - 1, 2 do redis.call('HSETNX', KEYS[4], ARGV[i], ARGV[i + 1]) end
  position = redis.call('RPUSH', KEYS[2], ARGV[6]) - 1
  redis.call('HSET', KEYS[3], ARGV[5], position)
  for i = first_count, #ARGV, 2 do
    if ARGV[i]:sub(1, 2) ~= 'f:' then redis.call('HINCRBY', KEYS[1], ARGV[i], ARGV[i + 1])
    elseif redis.call('HSETNX', KEYS[1], ARGV[i], ARGV[i + 1]) == 1 then index().change(ARGV[i], false, ARGV[i + 1], member()) end
  end
  if redis.call('HEXISTS', KEYS[1], 'held') == 1 then set_lease(reservations_of_others(ARGV[5]), ARGV[5], 0) end
  if ARGV[9] ~= '' and redis.call('HEXISTS', KEYS[1], 'f:' .. ARGV[9]) == 1 then
    redis.call('HSET', KEYS[5], 'late:' .. ARGV[5], '1')
    redis.call('HINCRBY', KEYS[1], 'n:late', 1)
  end
  publish(' ' .. position .. ' ' .. ARGV[5])
end
touch()
return {tonumber(position), redis.call('HEXISTS', KEYS[5], 'late:' .. ARGV[5]), is_restored, is_new}
