"""The settings of the archive."""

import pytest
from pydantic import ValidationError

from proxy.config.archive import ArchiveSettings


def test_nothing_is_archived_by_default():
    assert (None, "acknowledged", False) == (ArchiveSettings().url, ArchiveSettings().when, ArchiveSettings().delete)


@pytest.mark.parametrize("wrong", [{"when": "now"}, {"interval_s": 0}, {"rollouts_per_file": 0}, {"urls": "x"}])
def test_other_values_are_rejected(wrong):
    with pytest.raises(ValidationError):
        ArchiveSettings(**wrong)
