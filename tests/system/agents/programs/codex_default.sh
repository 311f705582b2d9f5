# Codex as it is installed: its built-in provider tries a WebSocket first, and the tools of its default model are functions of one
# JavaScript tool. The folder's name selects the script.
export CODEX_HOME="$HOME/.codex"
mkdir -p "$CODEX_HOME" code && cd code
printenv OPENAI_API_KEY | codex login --with-api-key >&2
codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox \
  -c openai_base_url="$OPENAI_BASE_URL" -c check_for_update_on_startup=false -c analytics.enabled=false "$1" < /dev/null >&2
node -e 'console.log(JSON.stringify({ answer: fs.readFileSync("fixed.txt", "utf8"), calls: [] }))'
