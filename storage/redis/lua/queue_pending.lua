-- MAX_LEASE_MS is the maximum lease in ms: an entry that has been idle for this long has no holder.
local MAX_LEASE_MS = 86400000
local function claim(stream, entry_id, holder, idle)
  return #redis.call('XCLAIM', stream, 'holders', holder, 0, entry_id, 'IDLE', idle, 'JUSTID') == 1
end
