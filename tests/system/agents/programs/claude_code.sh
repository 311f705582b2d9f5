# Anthropic's Claude Code, which really runs commands, in the folder that it is started in.
export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
claude --print --allowedTools Bash -- "$1" < /dev/null >&2
node -e 'console.log(JSON.stringify({ answer: fs.readFileSync("mended.txt", "utf8"), calls: [] }))'
