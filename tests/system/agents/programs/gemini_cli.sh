# Google's Gemini CLI, which runs real commands in its working directory. With a base URL it requires the kind of key too.
mkdir -p ~/.gemini
cat > ~/.gemini/settings.json << end
{"security": {"auth": {"selectedType": "gemini-api-key"}}, "privacy": {"usageStatisticsEnabled": false}}
end
gemini --yolo --skip-trust --model gemini-2.5-pro "$1" < /dev/null >&2
node -e 'console.log(JSON.stringify({ answer: fs.readFileSync("fixed.txt", "utf8"), calls: [] }))'
