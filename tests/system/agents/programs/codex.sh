# OpenAI's Codex, which runs real commands and patches files in its working directory. Its built-in provider tries WebSockets
# first; this one does not. The base URL can be set in its configuration only.
export CODEX_HOME="$HOME/.codex"
mkdir -p "$CODEX_HOME"
codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox \
  -c model_provider=tape -c model_providers.tape.name=tape -c model_providers.tape.base_url="$OPENAI_BASE_URL" \
  -c model_providers.tape.wire_api=responses -c model_providers.tape.env_key=OPENAI_API_KEY \
  -c model=gpt-5.5 -c check_for_update_on_startup=false -c analytics.enabled=false "$1" < /dev/null >&2
node -e 'console.log(JSON.stringify({ answer: fs.readFileSync("fixed.txt", "utf8"), calls: [] }))'
