# Codex with its default model: its tools are functions of one JavaScript tool. The folder's name selects the script.
export CODEX_HOME="$HOME/.codex"
mkdir -p "$CODEX_HOME" code && cd code
codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox \
  -c model_provider=tape -c model_providers.tape.name=tape -c model_providers.tape.base_url="$OPENAI_BASE_URL" \
  -c model_providers.tape.wire_api=responses -c model_providers.tape.env_key=OPENAI_API_KEY \
  -c check_for_update_on_startup=false -c analytics.enabled=false "$1" < /dev/null >&2
node -e 'console.log(JSON.stringify({ answer: fs.readFileSync("fixed.txt", "utf8"), calls: [] }))'
