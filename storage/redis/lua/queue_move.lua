-- From one holder to another, '-' being nobody and '' out of the queue. From nobody is also: from one whose lease ran
-- out. An entry that is there already may have been moved by this very script, whose answer was lost. A group that is
-- no more leaves the queue.
-- ARGV: from, to, place, how long the entry is to be idle, changes.
if redis.call('EXISTS', KEYS[8]) == 0 then return 0 end
local from, to, place = ARGV[4], ARGV[5], ARGV[6]
local pending = redis.call('XPENDING', KEYS[8], 'holders', place, place, 1)[1]
if not pending then return 0 end
local owner, is_free = pending[2], pending[3] >= LONGEST
if owner ~= to and owner ~= from and not (from == '-' and is_free) then return 0 end
local is_gone = redis.call('EXISTS', KEYS[1]) == 0
if to == '' or is_gone then
  redis.call('XACK', KEYS[8], 'holders', place)
  redis.call('XDEL', KEYS[8], place)
elseif not give(KEYS[8], place, to, ARGV[7]) then return 0 end
if owner ~= '-' and owner ~= to and #redis.call('XPENDING', KEYS[8], 'holders', '-', '+', 1, owner) == 0 then
  redis.call('XGROUP', 'DELCONSUMER', KEYS[8], 'holders', owner)
end
if is_gone then return 0 end
change(8)
return 1
