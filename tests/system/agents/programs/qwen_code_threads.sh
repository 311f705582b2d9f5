# Qwen Code with the part of the context window that it uses before it compresses the history.
export OPENAI_MODEL=policy
mkdir -p ~/.qwen
echo "{\"context\": {\"autoCompactThreshold\": $1}}" > ~/.qwen/settings.json
qwen --yolo --auth-type openai "$2" < /dev/null >&2
