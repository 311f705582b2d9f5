# Cline's command line, which runs real commands in its working directory.
cline auth --provider openai-compatible --apikey "$OPENAI_API_KEY" --modelid policy --baseurl "$OPENAI_BASE_URL" < /dev/null >&2
cline --json "$1" < /dev/null >&2
node -e 'console.log(JSON.stringify({ answer: fs.readFileSync("fixed.txt", "utf8"), calls: [] }))'
