"""Generates docs/cli.md: an introduction, every command with the names of its options, and the exit codes."""

import inspect
from collections.abc import Iterator
from typing import Any, Final, get_args, get_type_hints

from typer.models import ArgumentInfo, CommandInfo, OptionInfo

from proxy.cli.main import app
from proxy.cli.runner import Exit

_COMMON: Final = {"--api-key", "--json", "--url", "--store", "--config"}
_OPENING: Final = """`tokentape COMMAND --help` describes the options of a command.

```console
$ tokentape check --engine http://127.0.0.1:8000      # find problems before a start
$ tokentape certify http://127.0.0.1:8000             # is training on this engine safe? (docs/exactness.md)
$ tokentape serve --engine http://127.0.0.1:8000
$ tokentape tail                                      # in another terminal: follow new steps
$ tokentape list --status completed --since 2h
$ tokentape show ROLLOUT --logprobs
$ tokentape export --out rows.ndjson
```

- **Output.** Results go to standard output, everything else to standard error. With `--json`, standard output is one JSON
  document (`tail` and `simulate`: one line per document) in the shapes of the [control API](http-api.md).
- **Terminal.** Pipes get no colors and all columns. `NO_COLOR=1` disables colors, `FORCE_COLOR=1` keeps them
  (`tokentape show R | less -R`). Control and invisible characters are printed escaped.
- **Completion.** `tokentape --install-completion` adds completion of commands, options and rollout IDs to bash, zsh or fish
  (tested: bash).
- **Common options.** `--url` is the control API of a running proxy (or `TOKENTAPE_URL`; default: the only one that this user
  runs on this machine, else `http://127.0.0.1:8400`), `--api-key` a control key (or `TOKENTAPE_API_KEY`). `--store` reads a
  store directly, while no other process has it open. `--config` is a file with [settings](settings.md). `--set NAME=VALUE` adds
  a field of the request in the [control API](http-api.md): a value that is JSON as JSON, else as text.
"""

_SCRIPT: Final = """## A script for the simulator

`tokentape simulate --script FILE` replies from a YAML or JSON file to chats. The first conversation with a `when` that occurs
in the first user message, or else in a later one, applies:

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
      cut: 2                                               # and the next one loses its connection after two tokens
```

- Every field of a turn is optional. A file may also be a single list of turns, for every chat.
- The turn is the number of assistant messages in the request, so each rollout, retry and branch gets its own. A chat with more
  turns, or without a conversation, gets 400.
- `cut: [{after: 2, by: abort}, {after: 5, by: torn}]` cuts several attempts: `abort` as an engine aborts a call, `lost` between
  two events of a stream, `torn` within one.
- A prompt of ids that ends inside a reply of the simulator gets the rest of that reply, with the seed of the request plus the
  number of its tokens.
- Replies are sampled as token ids with logprobs, and parsed as vLLM's and SGLang's parsers do. Completions are not scripted.
"""

_LOOKS: Final = """## Examples

![tokentape show](images/cli-show.svg)

![tokentape show --logprobs](images/cli-logprobs.svg)

![tokentape list](images/cli-list.svg)

![tokentape tail](images/cli-tail.svg)

A fault of `check` prevents or loses recorded steps or allows unintended access; a note is a warning.

![tokentape check](images/cli-check.svg)

![tokentape audit](images/cli-audit.svg)
"""


def cli_page(made: str) -> str:
    """Return docs/cli.md. `made` is the comment on how the page is generated."""
    codes = [f"| {code.value} | {code.meaning} |" for code in Exit]
    commands = [_command(name, command) for name, command in _commands() if not command.hidden]
    return (
        f"# The command line\n\n{made}{_OPENING}\n## Commands\n\n"
        + "\n".join(commands)
        + "\n\n## Exit codes\n\n| code | meaning |\n|---:|---|\n"
        + "\n".join(codes)
        + f"\n\n{_LOOKS}\n{_SCRIPT}"
    )


def _commands() -> Iterator[tuple[str, CommandInfo]]:
    """Yield each command with its name; the name in a group is `GROUP COMMAND`."""
    for command in app.registered_commands:
        yield command.name or command.callback.__name__, command
    for group in app.registered_groups:
        inner = group.typer_instance
        yield from ((f"{inner.info.name} {command.name}", command) for command in inner.registered_commands)


def _command(name: str, command: CommandInfo) -> str:
    """Return an item of the list of commands: its arguments, its description, and its options but those of every command."""
    function: Any = command.callback
    hints = get_type_hints(function, include_extras=True)
    arguments, options = "", []
    for parameter, declared in inspect.signature(function).parameters.items():
        kind = next(iter(get_args(hints[parameter])[1:]), None)
        if isinstance(kind, ArgumentInfo):
            required = declared.default is inspect.Parameter.empty
            arguments += f" {parameter.upper()}" if required else f" [{parameter.upper()}]"
        elif isinstance(kind, OptionInfo):
            # typer reads the first name of an annotated option as its default.
            flags = [flag for flag in (kind.default, *(kind.param_decls or ())) if str(flag).startswith("-")]
            options.append(flags[0] if flags else f"--{parameter.replace('_', '-')}")
    own = [f"`{option}`" for option in options if option not in _COMMON]
    first = " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split())
    return f"- `{name}{arguments}`: {first}" + (f" Options: {', '.join(own)}." if own else "")
