"""The sections of the archive and of threads."""

import pytest
from pydantic import ValidationError

from proxy.config.sections import ArchiveSettings
from proxy.config.settings import load


def test_nothing_is_archived_by_default():
    assert (ArchiveSettings().url, ArchiveSettings().when, ArchiveSettings().delete) == (None, "acknowledged", False)


@pytest.mark.parametrize(
    "wrong",
    [
        {"when": "now"},
        {"interval_s": 0},
        {"rollouts_per_file": 0},
        {"urls": "x"},
        {"memory_share": 0.5},
        {"memory_share": 1, "delete": True},
    ],
)
def test_other_values_of_the_archive_are_rejected(wrong):
    with pytest.raises(ValidationError):
        ArchiveSettings(**wrong)


@pytest.mark.parametrize(
    ("section", "default"),
    [
        ({}, None),
        ({"presets": ["claude-code"]}, "agents"),
        ({"presets": ["claude-code"], "export": "all"}, "all"),
        ({"export": "main"}, "main"),
    ],
)
def test_presets_export_agents_by_default(section, default):
    assert default == load(threads=section).threads.default


@pytest.mark.parametrize(
    ("section", "setting"),
    [
        ({"rules": [{"kind": "auxiliary", "system": ""}]}, "threads.rules.0.system"),
        ({"rules": [{"kind": "main", "model": "a"}, {"kind": "main", "model": "**"}]}, "threads.rules.1.model"),
        ({"rules": [{"kind": "auxiliary", "user": ["a"]}]}, "threads.rules.0.user"),
        ({"rules": [{"kind": "auxiliary", "agent": 7}]}, "threads.rules.0.agent"),
        ({"rules": [{"kind": "auxiliary", "tools": "*"}]}, "threads.rules.0.tools"),
        ({"rules": [{"kind": "auxiliary", "system": "x" * 1001}]}, "threads.rules.0.system"),
        ({"rules": [{"kind": "title", "system": "x"}]}, "threads.rules.0.kind"),
        ({"rules": [{"kind": "auxiliary"}]}, "threads.rules.0"),
        ({"rules": [{"kind": "auxiliary", "pattern": "x"}]}, "threads.rules.0.pattern"),
        ({"rules": [{"kind": "auxiliary", "system": "x"}] * 101}, "threads.rules"),
        ({"presets": ["emacs"]}, "threads.presets.0"),
        ({"export": "some"}, "threads.export"),
    ],
)
def test_a_rule_that_is_no_pattern_is_refused_with_the_name_of_the_setting(section, setting):
    with pytest.raises(ValueError, match="1 validation error") as error:
        load(threads=section)

    assert [".".join(map(str, fault["loc"])) for fault in error.value.errors()] == [setting]
