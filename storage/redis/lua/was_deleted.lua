-- Return whether the rollout with this incarnation was deleted. Without a TTL, it cannot have expired. KEYS[8]: the
-- deleted incarnations.
local function was_deleted(incarnation)
  return tonumber(ARGV[3]) == 0 or redis.call('ZSCORE', KEYS[8], incarnation) ~= false
end
