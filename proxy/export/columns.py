"""The types of a row's fields, for containers that have types.

Holds their names, and nothing of the library that knows them. A type is a name, a list of one type, or an object of them.
"""

from collections.abc import Mapping
from typing import Final, TypeAlias

# Recursive types are not written before Python 3.12's `type`.
Column: TypeAlias = "str | list[Column] | dict[str, Column]"
Columns: TypeAlias = "Mapping[str, Column]"

TEXT: Final = "text"
JSON: Final = "json"  # whatever people gave, as JSON text: rows of one column must be of one type, and these are not
FLAG: Final = "bool"
BIT: Final = "int8"
ID: Final = "int32"
COUNT: Final = "int64"
LOGPROB: Final = "float32"
REWARD: Final = "float64"

IDS: Final[list[Column]] = [ID]
BITS: Final[list[Column]] = [BIT]
LOGPROBS: Final[list[Column]] = [LOGPROB]
