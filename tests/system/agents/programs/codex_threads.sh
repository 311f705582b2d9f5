# OpenAI's Codex with a limit of tokens after which it compacts the history; further words continue the session.
export CODEX_HOME="$HOME/.codex"
mkdir -p "$CODEX_HOME"
cat > "$CODEX_HOME/config.toml" << end
model = "gpt-5.5"
model_provider = "tape"
model_auto_compact_token_limit = $1
check_for_update_on_startup = false
analytics.enabled = false
model_providers.tape = {name = "tape", base_url = "$OPENAI_BASE_URL", wire_api = "responses", env_key = "OPENAI_API_KEY"}
end
codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox "$2" < /dev/null >&2
for prompt in "${@:3}"; do
  codex exec resume --last --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox "$prompt" < /dev/null >&2
done
