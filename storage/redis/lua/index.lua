-- The index is the last key. It has for each indexed field of a rollout `FIELD=VALUE`, a zero byte, and the member of the listing.
-- INDEXED maps these fields to the value that counts if it is absent or empty ('': none). The functions are made by those who
-- need them: most calls change no indexed field.
local function index()
  local key, fields = KEYS[#KEYS], INDEXED()
  local function entry(field, value, member)
    if not value or value == '' then value = fields[field] end
    return value ~= '' and field .. '=' .. string.gsub(string.sub(value, 1, 200), '%z', ' ') .. '\0' .. member or nil
  end
  local function entries(rollout, member)
    local found = {}
    for field in pairs(fields) do found[#found + 1] = entry(field, redis.call('HGET', rollout, field), member) end
    return found
  end
  local function add(rollout, member)
    for _, it in ipairs(entries(rollout, member)) do redis.call('ZADD', key, 0, it) end
  end
  local function remove(removed)
    return #removed > 0 and redis.call('ZREM', key, unpack(removed)) or 0
  end
  local function change(field, before, after, member)
    if not fields[field] then return end
    local old, new = entry(field, before, member), entry(field, after, member)
    if old == new then return end
    if old then redis.call('ZREM', key, old) end
    if new then redis.call('ZADD', key, 0, new) end
  end
  -- The first 100 values of the index, each as `FIELD=VALUE` and the zero byte: its other members are skipped.
  local function values()
    local found, from = {}, '-'
    while HAS_INDEX and #found < 100 do
      local first = redis.call('ZRANGE', key, from, '+', 'BYLEX', 'LIMIT', 0, 1)[1]
      local value = first and string.match(first, '^[^%z]*')
      if not value then break end
      found[#found + 1] = value .. '\0'
      from = '(' .. value .. '\1'
    end
    return found
  end
  -- Remove members, whatever the values of their rollouts were.
  local function forget(members)
    for _, value in ipairs(values()) do
      local removed = {}
      for i, member in ipairs(members) do removed[i] = value .. member end
      remove(removed)
    end
  end
  return {entries = entries, add = add, remove = remove, change = change, values = values, forget = forget}
end
