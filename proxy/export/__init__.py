"""The export formats, one module per trainer, and the containers of their rows."""

from proxy.export.areal import ArealFormat
from proxy.export.atif import AtifFormat, RolloutDetailFormat
from proxy.export.atropos import NodesFormat, ScoredDataFormat
from proxy.export.base import TEXT, Fill, Format, Inexpressible, Plan, Rows, extended
from proxy.export.marin import MarinFormat
from proxy.export.openrlhf import OpenRlhfExperienceFormat, OpenRlhfFormat
from proxy.export.osmosis import OsmosisFormat
from proxy.export.prime_rl import PrimeRlFormat
from proxy.export.sequences import SequencesFormat
from proxy.export.skyrl import SkyRlFormat, SkyRlStepwiseFormat
from proxy.export.slime import SlimeFormat
from proxy.export.steps import StepsFormat
from proxy.export.tinker import TinkerFormat
from proxy.export.trl import TrlAsyncFormat, TrlFormat
from proxy.export.verifiers import TrainingExamplesFormat, VerifiersFormat
from proxy.export.verl import VerlDataProtoFormat, VerlFormat

__all__ = ["FORMATS", "OF_POLICIES", "Fill", "Format", "Inexpressible", "Plan", "Rows", "with_threads"]

# To add a format, add its module and one line here.
_ALL: tuple[Format, ...] = (
    SequencesFormat(),
    StepsFormat(),
    NodesFormat(),
    ScoredDataFormat(),
    VerifiersFormat(),
    TrainingExamplesFormat(),
    MarinFormat(),
    OsmosisFormat(),
    TrlFormat(),
    TrlAsyncFormat(),
    VerlFormat(),
    VerlDataProtoFormat(),
    SlimeFormat(),
    SkyRlFormat(),
    SkyRlStepwiseFormat(),
    TinkerFormat(),
    PrimeRlFormat(),
    ArealFormat(),
    OpenRlhfFormat(),
    OpenRlhfExperienceFormat(),
    AtifFormat(),
    RolloutDetailFormat(),
)

FORMATS: dict[str, Format] = {form.name: form for form in _ALL}


_CANONICAL = ("sequences", "steps")  # formats with a policy and a thread in their rows
OF_POLICIES: dict[str, Format] = FORMATS | {name: extended(FORMATS[name], {"policy": TEXT}) for name in _CANONICAL}


def with_threads(form: Format) -> Format:
    """Return the format with a column for the thread, if its rows name it."""
    return extended(form, {"thread": TEXT}) if form.name in _CANONICAL else form
