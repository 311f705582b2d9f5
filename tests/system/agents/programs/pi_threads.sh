# pi with a context window, which it compacts; further words continue the session.
mkdir -p ~/.pi/agent
cat > ~/.pi/agent/models.json << end
{"providers": {"tape": {"baseUrl": "$OPENAI_BASE_URL", "api": "openai-completions", "apiKey": "OPENAI_API_KEY",
                        "models": [{"id": "policy", "contextWindow": $1}]}}}
end
echo '{"compaction": {"reserveTokens": 19000, "keepRecentTokens": 20}}' > ~/.pi/agent/settings.json
pi --offline --print --provider tape --model policy "${@:2}" < /dev/null >&2
