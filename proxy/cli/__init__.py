"""The command line: `main` defines the commands and options, the other modules implement them.

runner      exit codes; runs coroutines, and turns errors into messages; shared options; imports what it needs when it runs
settings    settings from the file and the environment, with command line overrides
console     output and notes; escaping of control characters; tables, JSON, progress bars
control     the control API, with the requests of `tokentape`
commands    `list`, `show`, `rollout`, `group`, `policy`, `engines` and `open`
tables      tables of rollouts, groups, policies and engines
render      renderings of rollouts and steps
serve       `serve` and `simulate`
tail        `tail`
export      `export`
push        `export --push`
archive     `archive` and `import`
audit       `audit`
check/      `check`
certify/    `certify`
"""
