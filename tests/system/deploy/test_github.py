"""The files of .github, which GitHub alone can run: their schemas, and the commands that they name."""

import re
import tomllib

import pytest
import yaml

from .conftest import DEPLOY

GITHUB = DEPLOY.parent / ".github"
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
VALIDATE = "from check_jsonschema import main; main()"


@pytest.mark.parametrize("path", [GITHUB / "workflows" / "ci.yml", *FORMS], ids=lambda path: path.name)
def test_each_file_conforms_to_githubs_schema(checker, path, tmp_path):
    """The check can fail."""
    schema = ("--builtin-schema", f"vendor.github-{'workflows' if path.name == 'ci.yml' else 'issue-forms'}")
    (wrong := tmp_path / path.name).write_text(path.read_text().replace("name:", "nmae:"))

    assert checker(VALIDATE, *schema, str(path))[0] == 0
    assert checker(VALIDATE, *schema, str(wrong))[0] != 0


def test_the_workflow_runs_what_ci_runs_and_builds_a_release_of_a_tag():
    """The commands are programs and targets of the tree; the release has every Python of the classifiers."""
    jobs = yaml.safe_load((GITHUB / "workflows" / "ci.yml").read_text())["jobs"]
    runs = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()}
    (pythons,) = [
        step["with"]["python-version"].split()
        for step in jobs["release"]["steps"]
        if "python-version" in step.get("with", {})
    ]
    classifiers = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]["classifiers"]

    assert runs["test"][-1] == ".ci/run"
    assert runs["release"] == ["make release PYTHON=python3.11"]
    assert re.search(r"^release:", (DEPLOY.parent / "Makefile").read_text(), re.MULTILINE)
    assert {f"Programming Language :: Python :: {version}" for version in pythons} == {
        name for name in classifiers if re.search(r":: 3\.\d+$", name)
    }
