# opencode with a context window, which it compacts, and with the title of the session that it requests by itself.
export OPENCODE_DISABLE_MODELS_FETCH=1
cat > opencode.json << end
{"model": "tape/policy", "autoupdate": false, "share": "disabled", "compaction": {"auto": true, "reserved": 100},
 "provider": {"tape": {"npm": "@ai-sdk/openai-compatible", "models": {"policy": {"limit": {"context": $1, "output": 2000}}},
   "options": {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"}}}}
end
opencode run "$2" < /dev/null >&2
