"""The digest of prepared data: equal for equal values, different for any other value, name or order."""

import dataclasses
import json
import re

import numpy as np
import pandas as pd
import pytest
from _prepared import CORPUS, IDS, data_folder, place

from splitfg.errors import DataError
from splitfg_lab.data import TableSet, data_digest, load_tokens, prepare

PLANTS = TableSet(
    name="plants",
    title="Plants",
    task="binary",
    targets=("kind",),
    categorical=("colour",),
)
FRAME = pd.DataFrame({"height": [0.5, np.nan, 2.0], "colour": ["red", None, "blue"], "kind": ["a", "b", "a"]})


def digest_of_table(folder, frame, kind="parquet", **options):
    folder.mkdir()
    path = folder / f"plants.{kind}"
    frame.to_csv(path, index=False) if kind == "csv" else frame.to_parquet(path, **options)
    prepare(PLANTS, path, folder)
    return data_digest(PLANTS, folder=folder)


def digest_of_tokens(folder, ids):
    (folder / "text" / "small-train.u16").write_bytes(ids.tobytes())
    prepare(CORPUS, None, folder)
    return data_digest(CORPUS, "train", folder)


def test_a_table_has_one_digest_whatever_its_file_format(tmp_path):
    digest = digest_of_table(tmp_path / "parquet", FRAME)
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", digest)
    assert digest_of_table(tmp_path / "csv", FRAME, "csv") == digest
    assert digest_of_table(tmp_path / "gzip", FRAME, compression="gzip") == digest


@pytest.mark.parametrize(
    "changed",
    [
        FRAME.assign(height=[0.5, np.nan, 2.5]),
        FRAME.assign(height=[0.5, 0.0, 2.0]),
        FRAME.assign(colour=["red", "None", "blue"]),
        FRAME.assign(kind=["a", "b", "b"]),
        FRAME.iloc[::-1],
        FRAME.iloc[:2],
        FRAME.rename(columns={"height": "width"}),
    ],
)
def test_any_other_table_has_another_digest(tmp_path, changed):
    assert digest_of_table(tmp_path / "a", FRAME) != digest_of_table(tmp_path / "b", changed)


def test_the_digest_of_a_corpus_follows_its_tokens_and_not_their_file(tmp_path):
    folder = data_folder(tmp_path)
    digest = data_digest(CORPUS, "train", folder)
    assert place(folder).is_dir(), "prepared on first use"
    assert digest_of_tokens(folder, IDS[::-1].copy()) != digest
    assert digest_of_tokens(folder, IDS) == digest


def test_the_digest_ignores_the_date_and_the_sources(tmp_path):
    folder = data_folder(tmp_path)
    digest = data_digest(CORPUS, "train", folder)
    path = place(folder) / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"date": "2001-01-01", "sources": []}))
    assert data_digest(CORPUS, "train", folder) == digest


def test_damaged_data_has_no_digest(tmp_path):
    folder = data_folder(tmp_path)
    load_tokens(CORPUS, "train", folder)
    (place(folder) / "tokens.u16").write_bytes(IDS[::-1].tobytes())
    with pytest.raises(DataError, match="damaged"):
        data_digest(CORPUS, "train", folder)


@pytest.mark.parametrize(
    ("data", "split", "complaint"),
    [
        (CORPUS, "", "has no split '': choose one of train"),
        (dataclasses.replace(PLANTS, raw=("x",)), "train", "leave the split out"),
        ("cifra10", "", "did you mean cifar10"),
    ],
)
def test_a_wrong_name_or_split_is_an_error(tmp_path, data, split, complaint):
    with pytest.raises(DataError, match=complaint):
        data_digest(data, split, tmp_path)
