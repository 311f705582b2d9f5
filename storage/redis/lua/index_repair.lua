-- Correct the entries of rollouts that a process of 0.1.0 may have written. Return how many were wrong.
-- KEYS: the hash of each rollout, the listing, the index.
-- ARGV: the member of the listing of each rollout.
local index, wrong = index(), 0
local values = index.values()
for i, member in ipairs(ARGV) do
  local right, removed = {}, {}
  if redis.call('EXISTS', KEYS[i]) == 1 and redis.call('ZSCORE', KEYS[#KEYS - 1], member) then
    for _, it in ipairs(index.entries(KEYS[i], member)) do
      right[it] = true
      wrong = wrong + redis.call('ZADD', KEYS[#KEYS], 0, it)
    end
  end
  for _, value in ipairs(values) do
    if not right[value .. member] then removed[#removed + 1] = value .. member end
  end
  wrong = wrong + index.remove(removed)
end
return wrong
