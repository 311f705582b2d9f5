-- Return the holders of a bucket's entries, and for how many ms each has not claimed or extended one of them.
-- KEYS: the stream.
if redis.call('EXISTS', KEYS[1]) == 0 then return {} end
local holders = {}
for _, holder in ipairs(consumers(KEYS[1])) do
  if holder['name'] ~= '-' and holder['pending'] > 0 then holders[#holders + 1] = {holder['name'], holder['idle']} end
end
return holders
