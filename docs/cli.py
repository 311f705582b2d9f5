"""Generates docs/cli.md: an introduction, the exit codes, and every command with its options."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, get_args, get_type_hints

from typer.models import ArgumentInfo, CommandInfo, OptionInfo

from proxy.cli.exit_codes import Exit
from proxy.cli.main import app

_REQUIRED: Final = inspect.Parameter.empty
_WORDS: Final = {int: "N", float: "NUMBER", Path: "PATH"}
_OPENING: Final = """Start the proxy, inspect and export what it recorded, and diagnose problems.
`tokentape COMMAND --help` lists the options of a command.

```console
$ tokentape check --engine http://127.0.0.1:8000      # find problems before a start
$ tokentape serve --engine http://127.0.0.1:8000
$ tokentape tail                                      # in another terminal: follow new steps
$ tokentape list --status completed --since 2h
$ tokentape show ROLLOUT --logprobs
$ tokentape export --url http://127.0.0.1:8400 --out rows.ndjson
```

- **Output.** Results go to standard output; notes, progress bars and errors go to standard error. With `--json`, standard
  output is one JSON document (`tail` and `simulate`: one line per document) in the shapes of the [control API](http-api.md).
- **Colors.** Without a terminal there are no colors or progress bars. `NO_COLOR=1` disables colors, and `FORCE_COLOR=1` keeps
  them in a pipe (`tokentape show R | less -R`).
- **Width.** On a terminal, tables omit the least important columns and list them. Files and pipes get all columns.
- **Escaping.** Text from agents, tools and engines can contain escape sequences that control a terminal. Control characters,
  text direction marks and invisible characters are printed escaped (`\\x1b[2J`), with `--json` as JSON escapes.
- **Source.** `list`, `show` and `tail` connect to the proxy at `--url` (or `TOKENTAPE_URL`) with `--api-key` (or
  `TOKENTAPE_API_KEY`). `list`, `show` and `export` can read a store directly with `--store` if no process has it open.
- **Completion.** `tokentape --install-completion` adds completion of commands, options and rollout IDs to bash, zsh or fish.
"""

_LOOKS: Final = """## Examples

A rollout: prompts are dimmed, trained completions are bright, and drift is shown where it occurs.

![tokentape show](images/cli-show.svg)

Completion tokens colored by logprob, in colors that are distinguishable with every kind of color vision:

![tokentape show --logprobs](images/cli-logprobs.svg)

![tokentape list](images/cli-list.svg)

![tokentape tail](images/cli-tail.svg)

`check` reports problems and how to fix them. A fault prevents or loses recorded steps or allows unintended access; the exit
code is then 3. A note is a warning.

![tokentape check](images/cli-check.svg)

![tokentape audit](images/cli-audit.svg)

`python -m docs.pictures` makes the pictures from a real run with the simulator.

Tested manually: `check` with a vLLM 0.32 that was started with `--max-logprobs 5` and without `--enable-scale-out`, by its URL
and by `https://…/v1/chat`; `show --logprobs` and `tail` of its steps; completion in bash 5.
Not tested: completion in zsh and fish.
"""


def cli_page(made: str) -> str:
    """Return docs/cli.md. `made` is the comment on how the page is generated."""
    codes = [f"| {code.value} | {code.meaning} |" for code in Exit]
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
    """Yield a command's heading, description and options, from the signature of its function."""
    function = command.callback
    hints = get_type_hints(function, include_extras=True)
    defaults = {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
    params = {name: next(iter(get_args(hints[name])[1:]), None) for name in defaults}
    arguments = [name for name, param in params.items() if isinstance(param, ArgumentInfo)]
    usage = "".join(f" {name.upper()}" if defaults[name] is _REQUIRED else f" [{name.upper()}]" for name in arguments)
    yield f"### `tokentape {command.name or function.__name__}{usage}`\n\n{inspect.getdoc(function)}\n"
    yield "| option | default | meaning |\n|---|---|---|"
    for name, param in params.items():
        if isinstance(param, OptionInfo):
            kind = get_args(hints[name])[0]
            # typer reads the first name of an annotated option as its default.
            flags = [flag for flag in (param.default, *(param.param_decls or ())) if str(flag).startswith("-")]
            names = ", ".join(f"`{flag}{_value(kind)}`" for flag in flags or [f"--{name.replace('_', '-')}"])
            yield f"| {names} | {_default(defaults[name])} | {_meaning(param)} |"
    yield ""


def _value(kind: Any) -> str:
    """Return the choices or the type of an option's value."""
    kinds = [choice for choice in get_args(kind) or (kind,) if choice is not type(None)]
    inner = kinds[0]
    if inner is bool:
        return ""
    if isinstance(inner, str):
        return " " + "\\|".join(kinds)
    if get_args(inner):
        return _value(inner)
    return f" {_WORDS.get(inner, 'TEXT')}"


def _default(default: Any) -> str:
    return "**required**" if default is _REQUIRED else "" if default is None or default is False else f"`{default}`"


def _meaning(option: OptionInfo) -> str:
    envvar = f" Environment variable: `{option.envvar}`." if option.envvar else ""
    return f"{option.help or ''}{envvar}".replace("|", "\\|")
