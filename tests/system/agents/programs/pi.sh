# pi, which runs real commands in its working directory. The base URL can be set in its list of models only.
mkdir -p ~/.pi/agent
cat > ~/.pi/agent/models.json << end
{"providers": {"tape": {"baseUrl": "$OPENAI_BASE_URL", "api": "openai-completions", "apiKey": "OPENAI_API_KEY",
                        "models": [{"id": "policy"}]}}}
end
pi --offline --print --provider tape --model policy "$1" < /dev/null >&2
node -e 'console.log(JSON.stringify({ answer: fs.readFileSync("fixed.txt", "utf8"), calls: [] }))'
