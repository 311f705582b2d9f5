# Anthropic's Claude Code, which runs real commands in its working directory.
export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
claude --print --allowedTools Bash -- "$1" < /dev/null >&2
node -e 'console.log(JSON.stringify({ answer: fs.readFileSync("fixed.txt", "utf8"), calls: [] }))'
