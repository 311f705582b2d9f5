# Cline's command line with a context window, which it compacts. The window can be set in its list of providers only.
cline auth --provider openai-compatible --apikey "$OPENAI_API_KEY" --modelid policy --baseurl "$OPENAI_BASE_URL" < /dev/null >&2
sed -i "s/\"model\": \"policy\"/&, \"contextWindow\": $1/" ~/.cline/data/settings/providers.json
cline --json "$2" < /dev/null >&2
