-- INDEXED maps each indexed field to the value that counts if it is absent or empty ('': none). The index is the last key, and has for
-- each of these fields of a rollout `FIELD=VALUE`, a zero byte, and the member of the listing.
local function entry(field, value, of)
  if not value or value == '' then value = INDEXED[field] end
  return value ~= '' and field .. '=' .. string.gsub(string.sub(value, 1, 200), '%z', ' ') .. '\0' .. of or nil
end
local function entries(rollout, of)
  local found = {}
  for field in pairs(INDEXED) do found[#found + 1] = entry(field, redis.call('HGET', rollout, field), of) end
  return found
end
local function add_to_index(rollout, of)
  for _, added in ipairs(entries(rollout, of)) do redis.call('ZADD', KEYS[#KEYS], 0, added) end
end
local function remove_from_index(removed)
  return #removed > 0 and redis.call('ZREM', KEYS[#KEYS], unpack(removed)) or 0
end
local function change_in_index(field, before, after, of)
  local old, new = entry(field, before, of), entry(field, after, of)
  if old == new then return end
  if old then redis.call('ZREM', KEYS[#KEYS], old) end
  if new then redis.call('ZADD', KEYS[#KEYS], 0, new) end
end
-- The first 100 values of the index, each as `FIELD=VALUE` and the zero byte: its other members are skipped.
local function indexed_values()
  local found, from = {}, '-'
  while next(INDEXED) and #found < 100 do
    local first = redis.call('ZRANGE', KEYS[#KEYS], from, '+', 'BYLEX', 'LIMIT', 0, 1)[1]
    local value = first and string.match(first, '^[^%z]*')
    if not value then break end
    found[#found + 1] = value .. '\0'
    from = '(' .. value .. '\1'
  end
  return found
end
-- Remove members of the listing from the index, whatever the values of their rollouts were.
local function remove_members(members)
  for _, value in ipairs(indexed_values()) do
    local removed = {}
    for i, member in ipairs(members) do removed[i] = value .. member end
    remove_from_index(removed)
  end
end
