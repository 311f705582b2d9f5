"""The types of a row's fields."""

import pytest
import worked

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
    """Whether a value is of a column's type; null fits all."""
    if value is None:
        return True
    if isinstance(column, list):
        return isinstance(value, list) and all(fits(each, column[0]) for each in value)
    if isinstance(column, dict):
        return value.keys() <= column.keys() and all(fits(each, column[key]) for key, each in value.items())
    return isinstance(value, TYPES[column])


@pytest.mark.parametrize("name", FORMATS)
def test_every_field_has_its_type(name):
    """A row has no field that its format's columns do not know, and each is of its type."""
    columns = FORMATS[name].columns
    for row in worked.rows(name, fill=Fill(prompt_length=4, response_length=10)):
        named = row if isinstance(row, dict) else dict(zip(columns, row, strict=True))

        assert fits(named, dict(columns))
