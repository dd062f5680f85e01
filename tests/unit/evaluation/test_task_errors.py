import pytest

from automodel_cli.config.errors import DataError
from automodel_cli.evaluation.task_errors import errors_of


def test_settings_of_a_task_are_named_in_full() -> None:
    rows = "2 rows of data.jsonl cannot be used\n      fix data.column_mapping='{prompt: <column>}'"
    with pytest.raises(DataError) as raised, errors_of("tasks.held_out"):
        raise DataError(rows, code="bad_rows", keys=("data.path", "max_new_tokens"), fix="data.on_invalid_row=drop")
    error = raised.value
    assert error.message == rows.replace("fix data.", "fix tasks.held_out.data.")
    assert error.keys == ("tasks.held_out.data.path", "max_new_tokens")
    assert error.fix == "tasks.held_out.data.on_invalid_row=drop"
