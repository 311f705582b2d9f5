# Qwen Code, which runs real commands in its working directory.
export OPENAI_MODEL=policy
qwen --yolo --auth-type openai "$1" < /dev/null >&2
node -e 'console.log(JSON.stringify({ answer: fs.readFileSync("fixed.txt", "utf8"), calls: [] }))'
