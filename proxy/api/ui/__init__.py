"""The page `/ui`: rollouts, their steps and their tokens, for people.

Holds the files that a browser loads, plain ES modules without a build step, and `serving`, which serves them. All that the
page shows comes from the control API, asked with the key that a person typed; nothing here reads the store.

serving       routes, types, security headers
app.js        routes within the page, the form for the key, keys of the keyboard, colours by day and night
api.js        asking the control API; the control key
live.js       what changed, told by GET /events
dom.js        making elements, of text alone
virtual.js    lists of which only the part in view is there
table.js      a list that is filtered, sorted and walked through
list.js       rollouts; groups.js, group.js: groups
rollout.js    a rollout: tree.js (its steps on a time line), sequences.js, plots.js
step.js       a step: messages.js, tokens.js with texts.js and colours.js
overview.js   plots over rollouts; charts.js draws them
raw.js        raw JSON
"""
