"""bench/record.py: results are appended, and never below columns that mean something else."""

import csv

import pytest

from bench.record import append_csv, machine


def test_rows_are_appended_below_one_header(tmp_path):
    path = tmp_path / "results" / "x.csv"
    append_csv(path, [{"a": 1, "b": "x, y"}])
    append_csv(path, [{"a": 2, "b": ""}, {"a": 3, "b": ""}])
    with path.open(newline="") as file:
        assert list(csv.reader(file)) == [["a", "b"], ["1", "x, y"], ["2", ""], ["3", ""]]
    with pytest.raises(ValueError, match="move it away"):
        append_csv(path, [{"a": 1, "c": 2}])


def test_a_result_names_versions_machine_date_and_command():
    facts = machine("bench.x")
    assert facts["command"].startswith("python -m bench.x")
    assert all(facts[name] for name in ("sglang", "torch", "git", "cpu", "cores", "date"))
