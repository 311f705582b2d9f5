-- Move an entry from one holder to another; '-' is no holder, '' removes the entry. An entry without a holder can
-- also be taken from a holder with an expired lease. If the entry already is where it should go, the response of
-- this script may have been lost. Entries of groups that no longer exist are removed. With a silence, an entry is not taken
-- from a holder that has claimed or extended entries of the stream within this time; reads do not change that.
-- ARGV: from, to, entry ID, idle time of the entry, silence in ms (0: none), changes (see fields.lua).
-- Return {1}, for a claim {1, note, fields, marks}; {0, for how many ms it is leased (0: it is available)}; {-1} if it is gone.
if redis.call('EXISTS', KEYS[8]) == 0 then return {-1} end
local from, to, entry_id = ARGV[4], ARGV[5], ARGV[6]
local pending = redis.call('XPENDING', KEYS[8], 'holders', entry_id, entry_id, 1)[1]
if not pending then return {-1} end
local owner, is_free = pending[2], pending[3] >= MAX_LEASE_MS
local left_ms = owner == '-' and 0 or math.max(0, MAX_LEASE_MS - pending[3])
if owner ~= to and owner ~= from and not (from == '-' and is_free) then
  return {0, left_ms}
end
if tonumber(ARGV[8]) > 0 and owner == from then
  for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[8], 'holders')) do
    local facts = {}
    for i = 1, #consumer, 2 do facts[consumer[i]] = consumer[i + 1] end
    if facts['name'] == from and facts['idle'] < tonumber(ARGV[8]) then return {0, left_ms} end
  end
end
local is_gone = redis.call('EXISTS', KEYS[1]) == 0
if to == '' or is_gone then
  redis.call('XACK', KEYS[8], 'holders', entry_id)
  redis.call('XDEL', KEYS[8], entry_id)
elseif not claim(KEYS[8], entry_id, to, ARGV[7]) then return {-1} end
if owner ~= '-' and owner ~= to and #redis.call('XPENDING', KEYS[8], 'holders', '-', '+', 1, owner) == 0 then
  redis.call('XGROUP', 'DELCONSUMER', KEYS[8], 'holders', owner)
end
if is_gone then return {-1} end
change(9)
if from ~= '-' then return {1} end
local entry = redis.call('XRANGE', KEYS[8], entry_id, entry_id)[1]
return {1, entry[2][3] == 'note' and entry[2][4] or '', redis.call('HGETALL', KEYS[1]), redis.call('HGETALL', KEYS[5])}
