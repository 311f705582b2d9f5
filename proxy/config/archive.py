"""The section of the settings for the archive of rollouts."""

from typing import Literal

from pydantic import Field

from proxy.config.sections import Section


class ArchiveSettings(Section):
    """The archive: finished rollouts as Parquet files (docs/datasets.md). It requires the extra `archive`."""

    url: str | None = Field(
        None,
        description="Path, or URL of fsspec such as s3://bucket/rollouts or hf://datasets/user/name, to which `serve` archives "
        "rollouts. Default: no archive.",
    )
    when: Literal["acknowledged", "finished"] = Field(
        "acknowledged",
        description="When rollouts are archived: finished; or acknowledged: those of a group with a size only once its batch "
        "is acknowledged or the group is dropped.",
    )
    older_than_s: float = Field(
        3600, ge=0, description="Seconds without a change after which such a rollout is archived."
    )
    delete: bool = Field(default=False, description="Whether archived rollouts are deleted from the store.")
    interval_s: float = Field(3600, gt=0, description="Seconds between two sweeps, each of which writes new files.")
    rollouts_per_file: int = Field(1000, ge=1, description="Maximum number of rollouts in a file.")
