"""The section of the policies: which models belong to each of them, and which are trained."""

import re
from typing import Annotated, Final, TypeAlias

from pydantic import AfterValidator, Field

from proxy.config.sections import Section

_DEFAULT: Final = "default"
_MAX_POLICIES: Final = 32  # every process sends a heartbeat for each, and reads those of all
POLICY_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class PolicySettings(Section):
    """One policy."""

    models: list[Annotated[str, Field(min_length=1)]] = Field(
        [],
        description="Names of its models at the engines, with `*` for any characters. A model belongs to the first policy that "
        "lists it, and to the policy `default` if none does.",
    )
    train: bool = Field(
        default=True, description="Whether its steps are exported without `policy`, and can be claimed."
    )


def _check(policies: dict[str, PolicySettings]) -> dict[str, PolicySettings]:
    """Raise ValueError for names and lists of models that are ambiguous."""
    if len(policies) > _MAX_POLICIES:
        raise ValueError(f"{len(policies)} policies are configured; at most {_MAX_POLICIES} are supported")
    listed: dict[str, str] = {}
    for name, policy in policies.items():
        if not POLICY_NAME.fullmatch(name):
            raise ValueError(
                f"invalid policy name {name!r}: use up to 64 letters, digits, '.', '_' and '-', and no sign first"
            )
        if (name == _DEFAULT) == bool(policy.models):
            raise ValueError(
                "policies.default accepts no models: it has the models of no other policy"
                if policy.models
                else f"policies.{name}.models is required"
            )
        for model in policy.models:
            if listed.setdefault(model, name) != name:
                raise ValueError(f"the model {model!r} is listed by the policies {listed[model]!r} and {name!r}")
    return policies


PolicyTable: TypeAlias = Annotated[dict[str, PolicySettings], AfterValidator(_check)]


def with_default(policies: dict[str, PolicySettings]) -> dict[str, PolicySettings]:
    """Return the policies with the default one, which is trained if no other policy is configured."""
    return policies if _DEFAULT in policies else {**policies, _DEFAULT: PolicySettings(train=not policies)}
