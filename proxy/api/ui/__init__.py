"""The web page at `/ui`, which shows rollouts, their steps and their tokens.

The browser loads plain ES modules; there is no build step. Views are components of Preact and htm, charts are drawn by uPlot
(`vendor/`). The page reads everything from the control API, with the key that the user enters.

routes.py     HTTP routes, content types, security headers
app.js        routes within the page, the key form, keyboard shortcuts, light and dark colours
api.js        requests to the control API; the control key
live.js       changes, streamed by GET /events, and the data of a view
html.js       templates, hooks, shortcuts; format.js: numbers, times and text; parts.js: small components
virtual.js    lists that render only the part in view
table.js      a table with sorting and keyboard navigation
rollouts.js   the list of rollouts, list.js: its table; groups.js: groups
compare.js    rollouts and branches side by side; difference.js: of turns and tokens
filter.js     filters of lists; selection.js: exports of selected rows
rollout.js    a rollout: steps.js with tree.js (its steps on a timeline), sequences.js
plots.js      plots of a rollout and of the newest ones; charts.js draws them
step.js       a step: messages.js, tokens.js with colours.js
training.js   rewards, advantages, lengths and staleness of the newest groups; mismatch.js: reports of trainers
raw.js        raw JSON
"""
