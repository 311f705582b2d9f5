"""The command line: `main` defines the commands and options, the other modules implement them.

exit_codes  exit codes and their meanings
invoke      runs coroutines, loads settings, reports misuse; imports what it needs when it runs
console     output and notes; escaping of control characters; tables, JSON, progress bars
options     options that several commands share; shell completion of rollout IDs
settings    settings from the file and the environment, with command line overrides
runner      runs a command and turns errors into messages and exit codes
api_client  JSON client of the control API
render/     rich renderings of rollouts, groups and steps
serve       `serve` and `simulate`
resources   the commands `rollout`, `group`, `policy`, `engines` and `open`
actions     `rollout`, `policy` and `open`: requests that change something
show        `list`, `show`, `group`, `policy list` and `engines`
tail        `tail`
export      `export`
push        `export --push`
archive     `archive` and `import`
audit       `audit`
check/      `check`
certify/    `certify`
"""
