# Anthropic's Claude Code with the title of the session that it requests by itself; further words continue the session.
claude --print --allowedTools Agent Bash -- "$1" < /dev/null >&2
for prompt in "${@:2}"; do
  claude --print --continue -- "$prompt" < /dev/null >&2
done
