-- `expected` compares fields. Its arguments start at ARGV[at]: number of fields, then for each: field, '=' .. value
-- ('' if it must be absent). `change` sets fields with the arguments from `first` to the last, in the same encoding.
local function expected(at)
  for i = at + 1, at + 2 * ARGV[at], 2 do
    local value = redis.call('HGET', KEYS[1], ARGV[i])
    if (value and '=' .. value or '') ~= ARGV[i + 1] then return false end
  end
  return true
end
local function change(first)
  local indexed = INDEXED()
  for i = first, #ARGV, 2 do
    if indexed[ARGV[i]] then
      local before, after = redis.call('HGET', KEYS[1], ARGV[i]), ARGV[i + 1] ~= '' and string.sub(ARGV[i + 1], 2)
      index().change(ARGV[i], before, after, member())
    end
    if ARGV[i + 1] == '' then redis.call('HDEL', KEYS[1], ARGV[i])
    else redis.call('HSET', KEYS[1], ARGV[i], string.sub(ARGV[i + 1], 2)) end
  end
  touch()
  publish('')
end
