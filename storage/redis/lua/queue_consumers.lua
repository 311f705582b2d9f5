-- `consumers` returns the holders of a bucket's entries, and '-'. Each has its `name`, its number of `pending` entries, and in
-- `idle` for how many ms it has not claimed or extended one: reads do not change that.
local function consumers(stream)
  local found = {}
  for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', stream, 'holders')) do
    local facts = {}
    for i = 1, #consumer, 2 do facts[consumer[i]] = consumer[i + 1] end
    found[#found + 1] = facts
  end
  return found
end
