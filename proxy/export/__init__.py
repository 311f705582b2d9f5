"""What a rollout is exported as: one file per format, and the containers rows come in."""

from proxy.export.base import Format, Rows
from proxy.export.sequences import SequencesFormat
from proxy.export.steps import StepsFormat

__all__ = ["FORMATS", "Format", "Rows"]

# By name. A new format is one file and one line here.
FORMATS: dict[str, Format] = {
    "sequences": SequencesFormat(),
    "steps": StepsFormat(),
}
