"""The real files, where they are at hand: the paper's counts come out exactly."""

import hashlib
import os
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from splitfg_lab.data import Windows, load_encoding, load_images, load_table, load_tokens, prepare, status, verify

pytestmark = pytest.mark.realdata

HERE = Path(os.environ.get("SPLITFG_DATA") or Path(__file__).resolve().parents[2].parent / "shared" / "data")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with links to the real files, so that preparing leaves no trace."""
    if not (HERE / "tabular").is_dir() or not (HERE / "text").is_dir():
        pytest.skip(f"no real data in {HERE}")
    made = tmp_path_factory.mktemp("data")
    for part in ("tabular", "text"):
        (made / part).symlink_to(HERE / part)
    return made


# Rows, features, classes of the files at hand; the subset is the one whose table must say so.
TABLES = {
    "adult": (48_842, 14, 2, ""),
    "higgs_small": (None, 28, 2, "subset"),
    "otto": (61_878, 93, 9, ""),
    "california": (20_640, 8, 0, ""),
    "house_16h": (22_784, 16, 0, ""),
    "diamond": (53_940, 9, 0, ""),
    "black_friday": (166_821, 9, 0, ""),
    "covertype": (581_012, 54, 7, ""),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables(folder, name):
    rows, features, classes, note = TABLES[name]
    table = load_table(name, folder)
    assert table.features.shape == (rows or len(table.target), features)
    assert len(table.classes) == classes
    if name != "higgs_small" or len(table.target) < 98_050:
        assert table.note.startswith(note)
    assert np.isfinite(table.target).all()
    if classes:
        assert np.array_equal(np.unique(table.target), np.arange(classes))
    numeric = table.features.drop(columns=list(table.categorical))
    assert all(dtype.kind == "f" for dtype in numeric.dtypes)
    assert verify(name, folder) == []


def test_adults_question_marks_are_missing_values(folder):
    missing = load_table("adult", folder).features.isna().sum()
    # UCI's description of the data: 2,799, 2,809 and 857 unknown values
    assert missing[missing > 0].to_dict() == {"workclass": 2799, "occupation": 2809, "native-country": 857}


def test_validation_and_test_tokens_as_in_the_paper(folder):
    valid, test = (load_tokens("wikitext103", split, folder) for split in ("valid", "test"))
    assert len(valid) == 249_750
    assert int((valid == 50_256).sum()) == 2_461
    assert len(test) == 286_178
    assert int((test == 50_256).sum()) == 2_891
    assert len(Windows(valid, 128)) * 128 == 249_728
    assert verify("wikitext103", folder) == []


def test_tokens_decode_to_the_lines_they_came_from(folder):
    encoding = load_encoding(folder)
    text = (HERE / "text" / "wiki.valid.raw").read_bytes()
    lines = [line for line in text.splitlines(keepends=True) if line.strip()]
    tokens = load_tokens("wikitext103", "valid", folder).tolist()
    assert encoding.decode_bytes(tokens) == b"".join(line + b"<|endoftext|>" for line in lines)
    assert encoding.n_vocab == 50_257


def test_the_official_archive_needs_no_unpacking(folder, tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "gpt2_bpe").symlink_to(HERE / "text" / "gpt2_bpe")
    with zipfile.ZipFile(tmp_path / "wikitext-103-raw-v1.zip", "w") as archive:
        for split in ("valid", "test"):
            archive.write(HERE / "text" / f"wiki.{split}.raw", f"wikitext-103-raw/wiki.{split}.raw")
    made = prepare("wikitext103", tmp_path / "wikitext-103-raw-v1.zip", tmp_path)
    assert [path.name for path in made] == ["valid", "test"]
    for split in ("valid", "test"):
        here, there = (load_tokens("wikitext103", split, place) for place in (folder, tmp_path))
        np.testing.assert_array_equal(here, there)


@pytest.mark.slow
def test_the_training_stand_in(folder):
    tokens = load_tokens("wikipedia", "train", folder)
    assert hashlib.sha256(tokens.tobytes()).hexdigest().startswith("8dd4e33f35dfa1a2")
    assert len(Windows(tokens, 128)) == 930_352
    states = {(s.name, s.split): s.state for s in status(folder)}
    assert states["wikipedia", "train"] == "prepared"
    assert states["wikitext103", "train"] == "missing"  # the stand-in is not the real one


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    places = [HERE / "images", HERE]
    found = [p / "cifar-10-batches-bin" for p in places if (p / "cifar-10-batches-bin").is_dir()]
    if not found:
        pytest.skip(f"no CIFAR-10 batches in {HERE}")
    made = tmp_path_factory.mktemp("images")
    with tarfile.open(made / "cifar.tar", "w") as archive:
        archive.add(found[0], "cifar-10-batches-bin")
    return made


@pytest.mark.slow
def test_cifar10(images):
    prepare("cifar10", images / "cifar.tar", images)
    data = load_images("cifar10", images)
    assert data.train_x.shape == (50_000, 3, 32, 32)
    assert np.bincount(data.train_y).tolist() == [5_000] * 10
    assert np.bincount(data.test_y).tolist() == [1_000] * 10
    assert data.note == ""
