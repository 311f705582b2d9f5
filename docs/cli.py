"""docs/cli.md: every command with its options, read off the commands themselves, and the exit codes.

Holds the page, with its opening and the pictures that `docs.pictures` makes. What a command does is said by the command.
"""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, get_args, get_type_hints

from typer.models import ArgumentInfo, CommandInfo, OptionInfo

from proxy.cli.exit_codes import Exit
from proxy.cli.main import app

_NEEDED: Final = inspect.Parameter.empty
_WORDS: Final = {int: "N", float: "NUMBER", Path: "PATH"}
_OPENING: Final = """`tokentape` starts the proxy, looks at what it recorded, and hands it on. Each command says what it takes:
`tokentape show --help`.

```console
$ tokentape check --engine http://127.0.0.1:8000      # is everything as it must be?
$ tokentape serve --engine http://127.0.0.1:8000
$ tokentape tail                                      # in another terminal: steps, as they are stored
$ tokentape list --status completed --since 2h
$ tokentape show ROLLOUT --logprobs
$ tokentape export --url http://127.0.0.1:8400 --out rows.ndjson
```

- **For people and for programs.** Answers go to standard output, everything else (notes, progress bars, errors) to standard
  error. With `--json` standard output is one JSON document (`tail` and `simulate`: a line each); the shapes are those of the
  [control API](http-api.md). Colours and bars are left out where there is no terminal; `NO_COLOR=1` leaves out colours
  anywhere, `FORCE_COLOR=1` keeps them in a pipe (`tokentape show R | less -R`).
- **At any width.** On a terminal a table leaves out the columns that matter least, and says which; into a file or a pipe it is
  written whole.
- **Harmless.** What agents, tools and engines wrote may hold escape sequences that rewrite a terminal or set its clipboard.
  They are spelt out (`\\x1b[2J`), as are marks of direction and invisible characters. `--json` does so by escapes of JSON.
- **Where.** `list`, `show` and `tail` ask the proxy at `--url` (or `TOKENTAPE_URL`), with `--api-key` (or
  `TOKENTAPE_API_KEY`) where it has control keys. `list`, `show` and `export` read a store that no process has open
  with `--store`.
- **Completion.** `tokentape --install-completion` teaches bash, zsh or fish the commands and options.
  `tokentape --version` says which one this is.
"""

_LOOKS: Final = """## What they look like

A rollout: what the agent sent is dimmed, what the policy sampled and a row trains is bright; drift stands where it happened.

![tokentape show](images/cli-show.svg)

The sampled tokens in the colours of their logprobs, which blue and orange tell apart for every kind of colour vision:

![tokentape show --logprobs](images/cli-logprobs.svg)

![tokentape list](images/cli-list.svg)

![tokentape tail](images/cli-tail.svg)

`check` says what is wrong, and how to mend each. A fault keeps steps from being recorded, loses them, or lets in whom nobody
meant, and makes the exit code 3; a note is worth knowing.

![tokentape check](images/cli-check.svg)

![tokentape audit](images/cli-audit.svg)

The pictures are made by `python -m docs.pictures`, of a real run against the simulator.

Tried by hand, beside the tests: `check` on a vLLM 0.32 that was started with `--max-logprobs 5` and without
`--enable-scale-out`, by its URL and by `https://…/v1/chat`; `show --logprobs` and `tail` of what it sampled; completion in
bash 5 of commands, options, choices and ids of rollouts. For zsh and fish, what typer writes was not run.
"""


def cli_page(made: str) -> str:
    """docs/cli.md; `made` says where it comes from."""
    codes = [f"| {each.value} | {each.meaning} |" for each in Exit]
    shown = [line for command in app.registered_commands if not command.hidden for line in _command(command)]
    return (
        "# The command line\n\n"
        + made
        + _OPENING
        + "\n## Exit codes\n\n| code | meaning |\n|---:|---|\n"
        + "\n".join(codes)
        + "\n\n"
        + _LOOKS
        + "\n## Commands\n\n"
        + "\n".join(shown).rstrip()
        + "\n"
    )


def _command(command: CommandInfo) -> Iterator[str]:
    """A command's heading, sentence and options, by the signature of its function."""
    function = command.callback
    hints = get_type_hints(function, include_extras=True)
    defaults = {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
    said = {name: next(iter(get_args(hints[name])[1:]), None) for name in defaults}
    arguments = [name for name, one in said.items() if isinstance(one, ArgumentInfo)]
    told = "".join(f" {name.upper()}" if defaults[name] is _NEEDED else f" [{name.upper()}]" for name in arguments)
    yield f"### `tokentape {command.name or function.__name__}{told}`\n\n{inspect.getdoc(function)}\n"
    yield "| option | default | meaning |\n|---|---|---|"
    for name, one in said.items():
        if isinstance(one, OptionInfo):
            kind = get_args(hints[name])[0]
            # The first name of an annotated option is where typer looks for its default.
            spelt = [each for each in (one.default, *(one.param_decls or ())) if str(each).startswith("-")]
            names = ", ".join(f"`{each}{_value(kind)}`" for each in spelt or [f"--{name.replace('_', '-')}"])
            yield f"| {names} | {_default(defaults[name])} | {_meaning(one)} |"
    yield ""


def _value(kind: Any) -> str:
    """What stands behind an option: its choices, or what it is."""
    kinds = [each for each in get_args(kind) or (kind,) if each is not type(None)]
    inner = kinds[0]
    if inner is bool:
        return ""
    if isinstance(inner, str):
        return " " + "\\|".join(kinds)
    if get_args(inner):
        return _value(inner)
    return f" {_WORDS.get(inner, 'TEXT')}"


def _default(default: Any) -> str:
    return "**needed**" if default is _NEEDED else "" if default is None or default is False else f"`{default}`"


def _meaning(option: OptionInfo) -> str:
    envvar = f" Or by `{option.envvar}`." if option.envvar else ""
    return f"{option.help or ''}{envvar}".replace("|", "\\|")
