"""The commands of docs/operations.md that deploy cannot be run here as written; the files and settings that they name exist."""

import re
import shlex

import pytest
from tests.support.pages import blocks_of

from docs.generate import settings_of
from proxy.config.settings import ENVIRONMENT_PREFIX, Settings

from .conftest import DEPLOY

PAGE = DEPLOY.parent / "docs" / "operations.md"
BLOCKS = [block.text for block in blocks_of(PAGE) if block.checked_by == "tests/system/deploy/test_instructions.py"]
MADE = {"secret.yaml", ".env", "deploy"}  # created by the reader from the examples; and the target of `cd`


def words_from(block):
    return [word.rpartition("=")[2] if word.startswith("--") else word for word in shlex.split(block, comments=True)]


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_every_file_in_a_command_exists(block):
    """Relative to the top, or to deploy/ after `cd deploy`."""
    top = DEPLOY if "cd deploy" in block else DEPLOY.parent
    files = {
        word
        for word in words_from(block)
        if re.fullmatch(r"(deploy/)?\w[\w./-]*\.(txt|yaml|example|service|sbatch)|deploy/[\w/]+", word)
    }

    assert [name for name in files - MADE if not (top / name).exists()] == []


def test_every_variable_is_a_setting():
    """Every TOKENTAPE_ variable on the page sets something."""
    names = {f"{ENVIRONMENT_PREFIX}{name.upper().replace('.', '__')}" for name, *_ in settings_of(Settings)}
    named = set(re.findall(r"TOKENTAPE_\w+", PAGE.read_text()))

    assert named
    assert {"TOKENTAPE_API_KEY"} == named - names  # of clients


def test_every_way_of_deployment_has_commands():
    """Docker, Compose, Kubernetes and systemd have a block of commands each, Slurm and SkyPilot one."""
    assert len(BLOCKS) == 5
    assert "deploy/kubernetes/valkey" in words_from(BLOCKS[2])
