"""Generates docs/cli.md: an introduction, the exit codes, and every command with its options."""

import inspect
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, get_args, get_type_hints

from typer.models import ArgumentInfo, CommandInfo, OptionInfo

from proxy.cli.main import app
from proxy.cli.runner import Exit

_REQUIRED: Final = inspect.Parameter.empty
_OF_A_PROXY: Final = ["`--api-key`", "`--json`", "`--url`"]
_WORDS: Final = {int: "N", float: "NUMBER", Path: "PATH"}
_OPENING: Final = """Start the proxy, inspect and export what it recorded, and diagnose problems.
`tokentape COMMAND --help` describes a command.

```console
$ tokentape check --engine http://127.0.0.1:8000      # find problems before a start
$ tokentape certify http://127.0.0.1:8000             # is training on this engine safe? (docs/exactness.md)
$ tokentape serve --engine http://127.0.0.1:8000
$ tokentape tail                                      # in another terminal: follow new steps
$ tokentape list --status completed --since 2h
$ tokentape show ROLLOUT --logprobs
$ tokentape rollout finish ROLLOUT --reward 1
$ tokentape group show GROUP
$ tokentape policy pause --drain-s 60
$ tokentape policy set 7
$ tokentape policy resume
$ tokentape open ROLLOUT                              # its page in the browser
$ tokentape export --url http://127.0.0.1:8400 --out rows.ndjson
```

- **Output.** Results go to standard output, everything else to standard error. With `--json`, standard output is one JSON
  document (`tail` and `simulate`: one line per document) in the shapes of the [control API](http-api.md).
- **Terminal.** Pipes get no colors and all columns. `NO_COLOR=1` disables colors, `FORCE_COLOR=1` keeps them
  (`tokentape show R | less -R`). Control and invisible characters are printed escaped.
- **Completion.** `tokentape --install-completion` adds completion of commands, options and rollout IDs to bash, zsh or fish.
"""

_LOOKS: Final = """## Examples

![tokentape show](images/cli-show.svg)

![tokentape show --logprobs](images/cli-logprobs.svg)

![tokentape list](images/cli-list.svg)

![tokentape tail](images/cli-tail.svg)

A fault of `check` prevents or loses recorded steps or allows unintended access; a note is a warning.

![tokentape check](images/cli-check.svg)

![tokentape audit](images/cli-audit.svg)

Not tested: completion in zsh and fish.

## A script for the simulator

`tokentape simulate --script FILE` replies from a YAML or JSON file to chats. Of several conversations, the first
one with a `when` that occurs in the first user message applies:

<!-- checked by tests/simulator/test_script.py -->
```yaml
- when: Oslo
  turns:
    - think: The user wants the weather.                   # reasoning
      say: I look that up.                                 # content
      call: [{name: weather, arguments: {city: Oslo}}]     # tool calls; arguments that are a string are sent unchanged
    - say: It rains.
- when: ""                                                 # any other chat
  turns:
    - say: Which city?
      fail: {status: 503, times: 1}                        # the first attempt gets this error,
      cut: 2                                               # and the next one, if streamed, ends after two tokens
```

- Every field of a turn is optional. A file may also be a single list of turns, for every chat.
- The turn is the number of assistant messages in the request, so each rollout, retry and branch gets its own. A chat with more
  turns, or without a conversation, gets 400.
- Replies are sampled as token ids with logprobs, and parsed as vLLM's and SGLang's parsers do. Completions are not scripted.

```console
$ tokentape simulate --listen 127.0.0.1:8000 --script script.yaml
$ tokentape serve --engine http://127.0.0.1:8000
```
"""


class _Option(NamedTuple):
    names: str
    meaning: str


def cli_page(made: str) -> str:
    """Return docs/cli.md. `made` is the comment on how the page is generated."""
    codes = [f"| {code.value} | {code.meaning} |" for code in Exit]
    commands = {name: command for name, command in _commands() if not command.hidden}
    occurrences = Counter(row for command in commands.values() for row in _options(command))
    common = [row for row, count in occurrences.items() if count > 1]
    sections = [line for name, command in commands.items() for line in _command(name, command, common)]
    return (
        "# The command line\n\n"
        + made
        + _OPENING
        + "\n## Exit codes\n\n| code | meaning |\n|---:|---|\n"
        + "\n".join(codes)
        + "\n\n"
        + _LOOKS
        + "\n## Common options\n\nA command that names none has `--url`, `--api-key` and `--json`.\n\n"
        + "\n".join(_list(common))
        + "\n\n## Commands\n\n"
        + "\n".join(sections).rstrip()
        + "\n"
    )


def _commands() -> Iterator[tuple[str, CommandInfo]]:
    """Yield each command with its name; the name in a group is `GROUP COMMAND`."""
    for command in app.registered_commands:
        yield command.name or command.callback.__name__, command
    for group in app.registered_groups:
        inner = group.typer_instance
        yield from ((f"{inner.info.name} {command.name}", command) for command in inner.registered_commands)


def _command(name: str, command: CommandInfo, common: Sequence[_Option]) -> Iterator[str]:
    """Yield a command's heading and description, a list of its own options, and the names of the common ones."""
    function = command.callback
    params, defaults = _parameters(command)
    arguments = [argument for argument, param in params.items() if isinstance(param, ArgumentInfo)]
    usage = "".join(f" {each.upper()}" if defaults[each] is _REQUIRED else f" [{each.upper()}]" for each in arguments)
    yield f"### `tokentape {name}{usage}`\n\n{inspect.getdoc(function)}\n"
    options = list(_options(command))
    if own := [option for option in options if option not in common]:
        yield from _list(own)
        yield ""
    shared = [_flag(option) for option in options if option in common]
    if shared and sorted(shared) != _OF_A_PROXY:
        yield f"Common options: {', '.join(shared)}.\n"


def _list(options: Iterable[_Option]) -> Iterator[str]:
    for option in options:
        yield f"- {option.names}: {option.meaning}"


def _flag(option: _Option) -> str:
    """Return an option's name without its value."""
    return f"`{option.names.split()[0].strip('`')}`"


def _parameters(command: CommandInfo) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return typer's information on each parameter of a command, and the defaults, by name."""
    hints = get_type_hints(command.callback, include_extras=True)
    defaults = {name: parameter.default for name, parameter in inspect.signature(command.callback).parameters.items()}
    return {name: next(iter(get_args(hints[name])[1:]), None) for name in defaults}, defaults


def _options(command: CommandInfo) -> Iterator[_Option]:
    """Yield the options of a command, from the signature of its function."""
    hints = get_type_hints(command.callback, include_extras=True)
    params, defaults = _parameters(command)
    for name, param in params.items():
        if isinstance(param, OptionInfo):
            kind = get_args(hints[name])[0]
            # typer reads the first name of an annotated option as its default.
            flags = [flag for flag in (param.default, *(param.param_decls or ())) if str(flag).startswith("-")]
            value = f" {param.metavar}" if param.metavar else _value(kind)
            names = ", ".join(f"`{flag}{value}`" for flag in flags or [f"--{name.replace('_', '-')}"])
            yield _Option(names, _meaning(param, defaults[name]))


def _value(kind: Any) -> str:
    """Return the choices or the type of an option's value."""
    kinds = [choice for choice in get_args(kind) or (kind,) if choice is not type(None)]
    inner = kinds[0]
    if inner is bool:
        return ""
    if isinstance(inner, str):
        return " " + "|".join(kinds)
    if get_args(inner):
        return _value(inner)
    return f" {_WORDS.get(inner, 'TEXT')}"


def _meaning(option: OptionInfo, default: Any) -> str:
    """Return the description, the default and the environment variable of an option."""
    value = "" if default is None or default is False else f" Default: `{default}`."
    note = " **Required.**" if default is _REQUIRED else value
    envvar = f" Environment variable: `{option.envvar}`." if option.envvar else ""
    return f"{option.help or ''}{note}{envvar}"
