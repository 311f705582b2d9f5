# Codex with its default model, whose tools are functions of one JavaScript tool. The folder's name selects the script.
mkdir code && cd code
CODEX_MODEL="" . "$(dirname "$0")/codex.sh"
