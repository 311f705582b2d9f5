"""The format `tinker`: shifted by one."""

from dataclasses import replace

import pytest
import worked
from forests import make_step

from proxy.export import Inexpressible


def test_worked_example():
    """All is from position 1 on; the input lacks the last token."""
    assert [
        {
            "model_input": [101, 102, 103, 201, 202, 9, 301, 302, 303, 304, 203],
            "target_tokens": [102, 103, 201, 202, 9, 301, 302, 303, 304, 203, 9],
            "logprobs": [0.0, 0.0, -0.5, -0.25, -0.125, 0.0, 0.0, 0.0, 0.0, -1.0, -0.0625],
            "advantages": [0.0, 0.0, 0.5, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.5, 0.5],
        }
    ] == worked.rows("tinker")


def test_no_advantage():
    """Without an advantage there is no datum."""
    with pytest.raises(Inexpressible, match="it has no advantage"):
        worked.rows("tinker", facts=replace(worked.FACTS, advantages=None))


def test_first_position():
    """What was sampled at the very first position would be lost, and is refused."""
    with pytest.raises(Inexpressible, match="its first token was sampled, and the format drops the first position"):
        worked.rows("tinker", [make_step("a", [], [10, 20])])


def test_real_datum():
    """Tinker's own class takes it, and types its fields by their names."""
    tinker = pytest.importorskip("tinker")
    (row,) = worked.rows("tinker")
    inputs = {key: value for key, value in row.items() if key != "model_input"}
    datum = tinker.Datum(model_input=tinker.ModelInput.from_ints(row["model_input"]), loss_fn_inputs=inputs)

    assert row["model_input"] == datum.model_input.to_ints()
    assert {"target_tokens": "int64", "logprobs": "float32", "advantages": "float32"} == {
        key: tensor.dtype for key, tensor in datum.loss_fn_inputs.items()
    }
    assert inputs == {key: tensor.to_numpy().tolist() for key, tensor in datum.loss_fn_inputs.items()}
