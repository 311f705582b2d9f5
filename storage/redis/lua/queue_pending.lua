-- LONGEST is MAX_LEASE of the queue in ms: an entry that is idle for so long is nobody's.
local LONGEST = 86400000
local function give(stream, place, holder, idle)
  return #redis.call('XCLAIM', stream, 'holders', holder, 0, place, 'IDLE', idle, 'JUSTID') == 1
end
