# Google's Gemini CLI with the part of the context window that it uses before it compresses the history; further words
# continue the session.
mkdir -p ~/.gemini
cat > ~/.gemini/settings.json << end
{"security": {"auth": {"selectedType": "gemini-api-key"}}, "privacy": {"usageStatisticsEnabled": false},
 "model": {"compressionThreshold": $1}}
end
gemini --yolo --skip-trust --model gemini-2.5-pro "$2" < /dev/null >&2
for prompt in "${@:3}"; do
  gemini --yolo --skip-trust --model gemini-2.5-pro --resume latest --prompt "$prompt" < /dev/null >&2
done
