"""The commands of deploy/README.md, which nobody can run here as they stand: what they name is there."""

import re
import shlex

import pytest

from docs.generate import settings_of
from proxy.config import ENVIRONMENT_PREFIX, Settings

from .conftest import DEPLOY

PAGE = DEPLOY / "README.md"
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)
MADE = {"secret.yaml", ".env", "deploy"}  # by the reader, of the examples; and where `cd` goes


def words_of(block):
    return [word.rpartition("=")[2] if word.startswith("--") else word for word in shlex.split(block, comments=True)]


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_every_file_that_a_command_names_is_in_the_tree(block):
    """From the top, or from deploy/ after `cd deploy`."""
    top = DEPLOY if "cd deploy" in block else DEPLOY.parent
    files = {
        word
        for word in words_of(block)
        if re.fullmatch(r"(deploy/)?\w[\w./-]*\.(txt|yaml|example|service)|deploy/[\w/]+", word)
    }

    assert [] == [name for name in files - MADE if not (top / name).exists()]


def test_every_setting_is_one():
    """Variables of ours that the page names set something."""
    names = {f"{ENVIRONMENT_PREFIX}{name.upper().replace('.', '__')}" for name, *_ in settings_of(Settings)}
    said = set(re.findall(r"TOKENTAPE_\w+", PAGE.read_text()))

    assert said
    assert set() == said - names


def test_there_is_something_to_look_at():
    """Docker, Compose, Kubernetes, systemd: a block of commands each."""
    assert 4 == len(BLOCKS)
    assert "deploy/kubernetes/valkey" in words_of(BLOCKS[2])
