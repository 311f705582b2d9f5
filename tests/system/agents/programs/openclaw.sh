# OpenClaw, which runs real commands in its working directory. The base URL can be set in its configuration only.
cat > openclaw.json << end
{"models": {"providers": {"tape": {"baseUrl": "$OPENAI_BASE_URL", "apiKey": "none", "api": "openai-completions",
                                   "models": [{"id": "policy", "name": "policy"}]}}}}
end
openclaw agent exec --config openclaw.json --model tape/policy "$1" < /dev/null >&2
node -e 'console.log(JSON.stringify({ answer: fs.readFileSync("fixed.txt", "utf8"), calls: [] }))'
