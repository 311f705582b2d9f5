"""The column types of all formats."""

import pytest
from tests.support import worked

from proxy.export import FORMATS, Fill

TYPES = {
    "text": str,
    "bool": bool,
    "int8": int,
    "int32": int,
    "int64": int,
    "float32": int | float,
    "float64": int | float,
    "json": object,
}


def fits(value, column):
    """Return whether a value has a column's type; null has every type."""
    if value is None:
        return True
    if isinstance(column, list):
        return isinstance(value, list) and all(fits(item, column[0]) for item in value)
    if isinstance(column, dict):
        return value.keys() <= column.keys() and all(fits(item, column[key]) for key, item in value.items())
    return isinstance(value, TYPES[column])


@pytest.mark.parametrize("name", FORMATS)
def test_every_field_of_a_row_has_a_column_of_its_type(name):
    columns = FORMATS[name].columns
    for row in worked.rows(name, fill=Fill(prompt_length=4, response_length=10)):
        named = row if isinstance(row, dict) else dict(zip(columns, row, strict=True))

        assert fits(named, dict(columns))
