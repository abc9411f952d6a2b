"""Tables: the same content from parquet and csv, and one error that lists everything wrong."""

import dataclasses

import numpy as np
import pandas as pd
import pytest

from splitfg.errors import DataError
from splitfg_lab.data import TableSet, find_dataset, load_table, prepare, verify
from splitfg_lab.data._table_files import _column

PETS = TableSet(
    name="pets",
    title="Pets",
    raw=("tabular/pets.parquet",),
    task="multiclass",
    targets=("kind", "class"),
    drop=("id",),
    categorical=("coat colour", "toy"),
    rows=5,
    features=4,
    classes=3,
)
FRAME = pd.DataFrame(
    {
        "id": [1, 2, 3, 4, 5],
        "weight": [3.5, 0.1, np.nan, 12.0, 2.25],
        "coat colour": ["red", "dark blue", None, "red", "it's"],
        "legs": [4, 4, 2, 4, 0],
        "toy": ["1", "0", "1", "1", None],
        "kind": ["cat", "cat", "bird", "dog", "dog"],
    }
)


def write(folder, kind):
    path = folder / f"pets.{kind}"
    if kind == "parquet":
        FRAME.to_parquet(path)
    elif kind == "pq":
        FRAME.assign(kind=FRAME["kind"].astype("category")).to_parquet(path)
    else:
        path.write_text(FRAME.to_csv(index=False, na_rep="?").replace(",", ", "))
    return path


@pytest.mark.parametrize("kind", ["parquet", "pq", "csv"])
def test_the_same_table_from_every_format(tmp_path, kind):
    prepare(PETS, write(tmp_path, kind), tmp_path)
    table = load_table(PETS, tmp_path)
    assert list(table.features.columns) == ["weight", "coat colour", "legs", "toy"]
    assert table.categorical == ("coat colour", "toy")
    assert table.features["coat colour"].tolist() == ["red", "dark blue", None, "red", "it's"]
    assert table.features["toy"].tolist() == ["1", "0", "1", "1", None]
    np.testing.assert_array_equal(table.features["weight"], [3.5, 0.1, np.nan, 12.0, 2.25])
    np.testing.assert_array_equal(table.features["legs"], [4, 4, 2, 4, 0])
    # 0.1 needs 64 bits, whole numbers do not: the type follows the values, not the file's format
    assert [str(table.features[c].dtype) for c in ("weight", "legs")] == ["float64", "float32"]
    assert table.classes == ("bird", "cat", "dog")
    assert table.target.tolist() == [1, 1, 0, 2, 2]
    assert table.note == ""
    assert verify(PETS, tmp_path) == []


@pytest.mark.parametrize("expected", [5, None])
def test_a_complete_table_says_so(tmp_path, expected):
    data = dataclasses.replace(PETS, rows=expected)
    prepare(data, write(tmp_path, "csv"), tmp_path)
    table = load_table(data, tmp_path)
    assert (table.rows, table.expected_rows, table.is_subset, table.note) == (5, expected, False, "")


def test_a_subset_is_accepted_and_noted(tmp_path):
    FRAME.iloc[:4].to_parquet(tmp_path / "pets.parquet")
    prepare(PETS, tmp_path / "pets.parquet", tmp_path)
    table = load_table(PETS, tmp_path)
    assert table.note == "subset: 4 of 5 rows"
    assert (table.rows, table.expected_rows, table.is_subset) == (4, 5, True)


def test_regression_targets_are_values(tmp_path):
    heights = dataclasses.replace(
        PETS, task="regression", targets=("weight",), drop=("id", "kind"), classes=None, features=3
    )
    FRAME.dropna(subset="weight").to_csv(tmp_path / "pets.csv", index=False)
    prepare(heights, tmp_path / "pets.csv", tmp_path)
    table = load_table(heights, tmp_path)
    assert table.target.dtype == np.float64
    assert table.target.tolist() == [3.5, 0.1, 12.0, 2.25]
    assert table.classes == ()


def test_number_like_labels_are_ordered_as_numbers_and_written_the_same(tmp_path):
    entry = dataclasses.replace(PETS, targets=("legs",), drop=("id", "kind"), features=3)
    for legs in ([10.0, 9.0, 2.0, 9.0, 10.0], [10, 9, 2, 9, 10], ["10", "9", "2", "9", "10"]):
        FRAME.assign(legs=legs).to_parquet(tmp_path / "pets.parquet")
        prepare(entry, tmp_path / "pets.parquet", tmp_path)
        table = load_table(entry, tmp_path)
        assert table.classes == ("2", "9", "10")
        assert table.target.tolist() == [2, 1, 0, 1, 2]


def problems_of(frame, tmp_path, entry=PETS):
    frame.to_parquet(tmp_path / "bad.parquet")
    with pytest.raises(DataError) as caught:
        prepare(entry, tmp_path / "bad.parquet", tmp_path)
    assert not (tmp_path / "prepared" / entry.name).exists()
    return caught.value.problems


def test_everything_wrong_with_the_columns_is_listed(tmp_path):
    problems = problems_of(FRAME.drop(columns=["kind", "toy"]).iloc[:0], tmp_path)
    assert len(problems) == 3
    assert any("no target column (kind or class)" in p for p in problems)
    assert any("no column toy" in p for p in problems)
    assert "no rows" in problems


def test_everything_wrong_with_the_values_is_listed(tmp_path):
    frame = FRAME.assign(
        weight=["a", "1", "2", "b", "3"], legs=[1.0, np.inf, 2.0, -np.inf, 3.0], kind=["cat", "dog", None, "cat", "dog"]
    )
    problems = problems_of(frame, tmp_path)
    assert len(problems) == 4
    assert any("weight must be numeric; it contains a, b" in p for p in problems)
    assert any("legs has 2 infinite" in p for p in problems)
    assert any("missing in 1 rows" in p for p in problems)
    assert any("2 classes (cat, dog); expected 3" in p for p in problems)


def test_wrong_counts(tmp_path):
    assert problems_of(FRAME.assign(more=1), tmp_path) == ("5 features; expected 4",)
    double = pd.concat([FRAME, FRAME], ignore_index=True)
    assert problems_of(double, tmp_path) == ("10 rows; the complete set has 5",)


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("x.parquet", b"PAR1 no parquet at all PAR1", "damaged"),
        ("x.parquet", b"", "damaged"),
        ("x.csv", b"", "damaged"),
        ("x.csv", b"a,b\n1,2,3\n4\n5,6,7,8\n", "damaged"),
        ("x.csv", b"\xff\xfe\x00a,b", "damaged"),
        ("x.arff", b"@relation x", "an ARFF file, which splitfg does not read\nconvert the file to parquet or csv"),
        ("x.xlsx", b"", "must be a parquet or csv file"),
        ("x", b"", "must be a parquet or csv file"),
    ],
)
def test_unreadable_files_are_one_clear_error(tmp_path, name, content, complaint):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=complaint):
        prepare(PETS, tmp_path / name, tmp_path)


def write_longer_rows(folder, more):
    header, *rows = FRAME.to_csv(index=False).splitlines()
    (folder / "pets.csv").write_text("\n".join([header, *(row + more for row in rows)]))
    return folder / "pets.csv"


@pytest.mark.parametrize("more", [",1", ",1,2", ",,"])
def test_values_without_a_name_are_errors(tmp_path, more):
    with pytest.raises(DataError, match="more values than its header has names\nname every column"):
        prepare(PETS, write_longer_rows(tmp_path, more), tmp_path)


def test_a_comma_at_the_end_of_every_row_is_no_column(tmp_path):
    prepare(PETS, write_longer_rows(tmp_path, ","), tmp_path)
    assert load_table(PETS, tmp_path).features["legs"].tolist() == [4, 4, 2, 4, 0]


def test_a_csv_of_nothing_but_a_header_has_no_rows(tmp_path):
    (tmp_path / "pets.csv").write_text(",".join(FRAME.columns))
    with pytest.raises(DataError, match="no rows"):
        prepare(PETS, tmp_path / "pets.csv", tmp_path)


def test_a_folder_is_no_table(tmp_path):
    with pytest.raises(DataError, match="not one table file"):
        prepare(PETS, tmp_path, tmp_path)


def test_arff_is_an_error_that_names_the_parquet_file(tmp_path):
    url = "https://data.openml.org/datasets/0000/1590/dataset_1590.pq"
    (tmp_path / "tabular").mkdir()
    path = tmp_path / "tabular" / "adult.ARFF"
    path.write_text("@relation adult")
    for act in (lambda: prepare("adult", path, tmp_path), lambda: load_table("adult", tmp_path)):
        with pytest.raises(DataError) as caught:
            act()
        assert f"{path} is an ARFF file" in caught.value.problems[0]
        assert url in caught.value.problems[0]
        assert "splitfg data fetch adult" in caught.value.hint


def test_loaders_check_the_kind(tmp_path):
    with pytest.raises(DataError, match="is a TextSet; expected a TableSet"):
        load_table("wikipedia", tmp_path)
    assert find_dataset("adult").targets == ("income", "class")


def test_words_for_missing_numbers_may_be_categories():
    frame = pd.DataFrame({"number": ["1", "NA", "3"], "kind": ["NA", "x", "None"]})
    problems: list[str] = []
    assert _column(frame["number"], False, problems).isna().tolist() == [False, True, False]
    assert _column(frame["kind"], True, problems).tolist() == ["NA", "x", "None"]
    assert not problems
