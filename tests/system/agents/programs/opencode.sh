# opencode, which runs real commands in its working directory. The base URL can be set in its configuration only.
export OPENCODE_DISABLE_MODELS_FETCH=1
cat > opencode.json << 'end'
{"model": "tape/policy", "autoupdate": false, "share": "disabled",
 "provider": {"tape": {"npm": "@ai-sdk/openai-compatible", "models": {"policy": {}},
   "options": {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"}}}}
end
opencode run "$1" < /dev/null >&2
node -e 'console.log(JSON.stringify({ answer: fs.readFileSync("fixed.txt", "utf8"), calls: [] }))'
