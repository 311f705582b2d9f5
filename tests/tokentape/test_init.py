"""`import tokentape` works in every environment; what is missing is an error of the constructor."""

import subprocess
import sys

import pytest

import tokentape

SERVER = {"aiohttp", "orjson", "proxy", "pydantic", "redis", "storage", "typer", "uvloop", "zstandard"}
WITHOUT = "import sys; sys.modules['httpx2'] = sys.modules['openai'] = None  # as if they were not installed\n"


def run(program: str) -> str:
    """What a program prints in a process of its own."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout


def test_importing_the_package_imports_no_dependency():
    """The command starts with it, so it must be fast."""
    program = "import sys, tokentape; print([name for name in sys.modules if name.startswith(('httpx', 'tokentape.'))])"

    assert run(program) == "[]\n"


def test_importing_the_clients_imports_nothing_of_the_server():
    """httpx2 is enough; openai is imported with ManagedServer."""
    program = (
        "import sys; from tokentape import AsyncClient, Client\n"
        f"print(sorted({{name.partition('.')[0] for name in sys.modules}} & {SERVER | {'openai'}}))"
    )

    assert run(program) == "[]\n"


def test_without_httpx2_every_public_name_is_importable():
    """Also from modules, and ManagedServer without openai."""
    program = (
        "import tokentape\n"
        "print([name for name in tokentape.__all__ if getattr(tokentape, name) is None])\n"
        "from tokentape import AsyncClient, Client, ManagedServer\n"
    )

    assert run(WITHOUT + program) == "[]\n"


@pytest.mark.parametrize(
    ("constructor", "sentence"),
    [
        ("Client('http://127.0.0.1:8400')", "Client requires httpx2: pip install 'httpx2>=2'"),
        ("AsyncClient('http://127.0.0.1:8400')", "AsyncClient requires httpx2: pip install 'httpx2>=2'"),
        ("ManagedServer(None)", "ManagedServer requires openai: pip install 'openai>=2'"),
    ],
)
def test_without_its_dependency_a_constructor_raises_one_sentence_with_the_command(constructor, sentence):
    """ImportError, with the original error as its cause."""
    program = (
        "from tokentape import *\n"
        f"try:\n    {constructor}\n"
        "except ImportError as error:\n    print(error, type(error.__cause__).__name__, sep='; ')\n"
    )

    assert run(WITHOUT + program) == f"{sentence}; ModuleNotFoundError\n"


def test_a_misspelled_name_raises_attribute_error():
    """Names that are imported when they are first used do not hide it."""
    with pytest.raises(AttributeError, match="ManagedServers"):
        _ = tokentape.ManagedServers


def test_the_public_names_are_listed_before_they_are_imported():
    """For completion in a REPL."""
    assert set(tokentape.__all__) <= set(dir(tokentape))
