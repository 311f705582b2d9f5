-- Whether a birth that is not the rollout's was deleted. It may have expired instead, if rollouts do. Key 8: the
-- deleted.
local function was_deleted(birth)
  return tonumber(ARGV[3]) == 0 or redis.call('ZSCORE', KEYS[8], birth) ~= false
end
