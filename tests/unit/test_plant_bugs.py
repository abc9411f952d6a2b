"""The script that plants bugs still finds the lines it spoils and the tests it relies on."""

import ast
import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

BUGS = importlib.import_module("tools.plant_bugs").BUGS


@pytest.mark.parametrize("bug", BUGS, ids=lambda b: b.name)
def test_bug_can_still_be_planted(bug):
    """The line occurs once, and what it becomes is still Python."""
    spoilt = bug.spoilt()
    assert spoilt != bug.path.read_text(encoding="utf-8")
    ast.parse(spoilt)


@pytest.mark.parametrize("bug", BUGS, ids=lambda b: b.name)
def test_tests_still_exist(bug):
    for test in bug.tests:
        file, *names = test.split("::")
        body = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
        for name in names:
            (node,) = [n for n in body if getattr(n, "name", None) == name.partition("[")[0]]
            body = node.body


def test_names_are_unique():
    assert len({b.name for b in BUGS}) == len(BUGS) >= 15


def test_a_part_of_no_name_is_an_error_and_runs_nothing(capsys):
    main = importlib.import_module("tools.plant_bugs.__main__").main
    with pytest.raises(SystemExit, match="2"):
        main(["no such bug"])
    assert "no bug's name contains no such bug" in capsys.readouterr().err
