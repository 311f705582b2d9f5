# Anthropic's Claude Code with a sub-agent, and with the title of the session that it requests by itself.
claude --print --allowedTools Agent -- "$1" < /dev/null >&2
