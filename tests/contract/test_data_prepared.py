"""Prepared data: replaced as a whole, checked once, damage noticed, read-only folders respected."""

import dataclasses
import errno
import hashlib
import json
import multiprocessing
import os
from pathlib import Path

import pytest
from _prepared import CORPUS, IDS, data_folder, listed, load_sum, place
from hypothesis import HealthCheck, given, settings, strategies as st

from splitfg.errors import DataError
from splitfg_lab.data import FileSet, TextSplit, _prepared as prepared_module, load_tokens, prepare, status, verify
from splitfg_lab.data._prepared import open_checked, read_meta
from splitfg_lab.data._writing import HashingWriter, building


@pytest.fixture
def folder(tmp_path):
    return data_folder(tmp_path)


def test_prepared_on_first_use_with_a_full_record(folder):
    assert load_tokens(CORPUS, "train", folder).tolist() == IDS.tolist()
    meta = json.loads((place(folder) / "meta.json").read_text())
    assert (meta["name"], meta["split"], meta["counts"]) == ("small", "train", {"tokens": 1000})
    (stored,) = meta["files"].values()
    assert (stored["dtype"], stored["shape"], stored["bytes"]) == ("<u2", [1000], 2000)
    (source,) = meta["sources"]
    assert source["file"] == "small-train.u16"
    assert source["sha256"] == stored["sha256"]  # plain tokens are kept byte for byte
    assert {path.name for path in place(folder).iterdir()} == {"meta.json", "tokens.u16", "checked.json"}


def test_checked_once_and_again_after_any_change(folder, monkeypatch):
    load_tokens(CORPUS, "train", folder)
    hashed = []
    real = prepared_module.digest_of
    monkeypatch.setattr(prepared_module, "digest_of", lambda path: hashed.append(path.name) or real(path))
    load_tokens(CORPUS, "train", folder)
    assert hashed == []
    data = place(folder) / "tokens.u16"
    data.write_bytes(data.read_bytes())  # same bytes, new time
    load_tokens(CORPUS, "train", folder)
    assert hashed == ["tokens.u16"]
    load_tokens(CORPUS, "train", folder)
    assert hashed == ["tokens.u16"]


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:-2]), "has 1,998 bytes; expected 2,000"),
        (lambda p: p.write_bytes(b"\x01" + p.read_bytes()[1:]), "has changed"),
        (lambda p: p.unlink(), "is missing"),
    ],
)
def test_damage_is_noticed_by_loaders_and_by_verify(folder, damage, complaint):
    load_tokens(CORPUS, "train", folder)
    damage(place(folder) / "tokens.u16")
    with pytest.raises(DataError, match=complaint):
        load_tokens(CORPUS, "train", folder)
    assert any(complaint in problem for problem in verify(CORPUS, folder))
    prepare(CORPUS, None, folder)
    assert load_tokens(CORPUS, "train", folder).tolist() == IDS.tolist()
    assert verify(CORPUS, folder) == []


def test_verify_hashes_even_what_was_marked_as_checked(folder):
    load_tokens(CORPUS, "train", folder)
    data = place(folder) / "tokens.u16"
    times = data.stat()
    data.write_bytes(b"\x07" + data.read_bytes()[1:])
    os.utime(data, ns=(times.st_atime_ns, times.st_mtime_ns))
    load_tokens(CORPUS, "train", folder)  # size and time are as before: not hashed again
    assert any("has changed" in problem for problem in verify(CORPUS, folder))


def test_verify_counts_against_the_catalogue(folder):
    load_tokens(CORPUS, "train", folder)
    stricter = dataclasses.replace(CORPUS, vocabulary=500, splits=(dataclasses.replace(CORPUS.splits[0], count=999),))
    problems = verify(stricter, folder)
    assert len(problems) == 2
    assert "1,000 tokens; expected 999" in problems[0]
    assert "token id 999" in problems[1]


def test_a_folder_that_holds_other_data_is_an_error_whatever_its_place(folder):
    load_tokens(CORPUS, "train", folder)
    other = dataclasses.replace(CORPUS, name="other")
    for data, split in ((other, "train"), (CORPUS, "valid")):
        both = dataclasses.replace(data, splits=(CORPUS.splits[0], TextSplit("valid", tokens=("small-valid*.u16",))))
        elsewhere = folder / "prepared" / data.name / split
        elsewhere.parent.mkdir(exist_ok=True)
        elsewhere.symlink_to(place(folder))
        complaint = f"holds small train, not {data.name} {split}"
        with pytest.raises(DataError, match=complaint):
            load_tokens(both, split, folder)
        assert any(complaint in problem for problem in verify(both, folder))
        elsewhere.unlink()
    assert load_tokens(CORPUS, "train", folder).tolist() == IDS.tolist()


def test_the_stand_in_does_not_pass_for_the_corpus_it_stands_in_for(folder):
    load_tokens(CORPUS, "train", folder)
    target = folder / "prepared" / "wikitext103" / "train"
    target.parent.mkdir()
    target.symlink_to(place(folder))
    with pytest.raises(DataError, match="holds small train, not wikitext103 train"):
        load_tokens("wikitext103", "train", folder)
    (found,) = [s for s in status(folder) if (s.name, s.split) == ("wikitext103", "train")]
    assert (found.state, "holds small train" in found.detail) == ("broken", True)


def test_verify_of_nothing_says_so(folder):
    (problem,) = verify(CORPUS, folder)
    assert "nothing to verify" in problem


def test_a_failed_preparation_leaves_what_was_there(folder, tmp_path):
    load_tokens(CORPUS, "train", folder)
    (tmp_path / "bad.u16").write_bytes(b"\xff\xff")
    with pytest.raises(DataError):
        prepare(CORPUS, tmp_path / "bad.u16", folder)
    assert load_tokens(CORPUS, "train", folder).tolist() == IDS.tolist()
    assert listed(place(folder).parent) == ["train"]


def test_a_full_disk_is_one_clear_error_and_leaves_nothing(folder, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DataError, match=r"cannot write .*No space left on device"):
        load_tokens(CORPUS, "train", folder)
    assert listed(place(folder).parent) == []
    monkeypatch.undo()
    assert load_tokens(CORPUS, "train", folder).tolist() == IDS.tolist()


def test_the_writer_knows_what_it_wrote(tmp_path):
    with HashingWriter(tmp_path / "x") as file:
        file.write(b"abc")
    assert file.bytes == 3
    # the published test vector of SHA-256 for "abc"
    assert file.sha256 == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_what_was_built_last_stays(tmp_path):
    for text in ("first", "second"):
        with building(tmp_path / "final") as folder:
            (folder / "who").write_text(text)
    assert (tmp_path / "final" / "who").read_text() == "second"
    assert listed(tmp_path) == ["final"]


def test_what_was_there_comes_back_where_it_cannot_be_replaced(tmp_path, monkeypatch):
    final = tmp_path / "final"
    with building(final) as first:
        (first / "who").write_text("first")
    rename, calls = Path.rename, []

    def failing(self, to):
        calls.append(to)
        if len(calls) == 2:
            raise OSError(5, "the cable is loose")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(DataError), building(final) as second:
        (second / "who").write_text("second")
    assert (final / "who").read_text() == "first"
    assert listed(tmp_path) == ["final"]


def test_many_processes_may_load_for_the_first_time_together(folder):
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        sums = pool.map(load_sum, [folder] * 6)
    assert set(sums) == {sum(range(1000))}
    assert listed(place(folder).parent) == ["train"]


def test_a_read_only_folder_stays_untouched(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.platform", "linux")
    folder.chmod(0o555)
    before = sorted(folder.rglob("*"))
    assert load_tokens(CORPUS, "train", folder).tolist() == IDS.tolist()
    assert sorted(folder.rglob("*")) == before
    assert list((tmp_path / "cache").rglob("tokens.u16"))
    assert load_tokens(CORPUS, "train", folder).tolist() == IDS.tolist()
    assert verify(CORPUS, folder) == []
    folder.chmod(0o755)


def test_missing_data_says_where_it_was_looked_for_and_what_to_do(tmp_path):
    with pytest.raises(DataError) as caught:
        load_tokens("wikitext103", "valid", tmp_path)
    text = str(caught.value)
    assert str(tmp_path / "text" / "wiki.valid.raw") in text
    assert "splitfg data fetch wikitext103" in text
    assert "splitfg data prepare wikitext103 --from PATH" in text


def test_status_of_every_set(tmp_path):
    (tmp_path / "tabular").mkdir()
    (tmp_path / "tabular" / "adult.csv").touch()
    (tmp_path / "prepared" / "otto").mkdir(parents=True)
    states = {(s.name, s.split): s for s in status(tmp_path)}
    assert states["adult", ""].state == "found"
    assert states["adult", ""].path == tmp_path / "tabular" / "adult.csv"
    assert states["otto", ""].state == "broken"
    assert states["wikitext103", "train"].state == "missing"
    assert {split for name, split in states if name == "wikitext103"} == {"train", "valid", "test"}


def test_plain_files_are_kept_byte_for_byte_and_all_problems_listed(tmp_path):
    contents = {"a.json": b"{}", "b.bpe": b"x y", "c": b""}
    known = tuple((name, "sha256:" + hashlib.sha256(blob).hexdigest()) for name, blob in contents.items())
    files = FileSet(name="files", title="Files", files=known)
    source = tmp_path / "source"
    source.mkdir()
    for name, blob in contents.items():
        (source / name).write_bytes(blob)
    (folder,) = prepare(files, source, tmp_path)
    assert {name: (folder / name).read_bytes() for name in contents} == contents
    assert verify(files, tmp_path) == []
    (source / "a.json").write_bytes(b"[]")
    (source / "c").unlink()
    with pytest.raises(DataError) as caught:
        prepare(files, source, tmp_path)
    assert len(caught.value.problems) == 2
    assert (folder / "a.json").read_bytes() == b"{}"


FOREIGN = [
    "",
    "{",
    "null",
    "[]",
    "3",
    '{"format": 2}',
    '{"format": 1, "files": [], "name": "small"}',
    '{"format": 1, "files": {}, "counts": {}, "sources": [], "name": 3, "split": "", "note": "", "date": ""}',
]


@pytest.mark.parametrize("text", FOREIGN)
def test_a_foreign_meta_file_is_one_clear_error(folder, text):
    load_tokens(CORPUS, "train", folder)
    (place(folder) / "meta.json").write_text(text)
    with pytest.raises(DataError, match="another program wrote it"):
        load_tokens(CORPUS, "train", folder)
    assert len(verify(CORPUS, folder)) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "object"},
        {"dtype": "float64"},
        {"shape": [1001]},
        {"shape": [-1000]},
        {"bytes": "many"},
        {"shape": "1000"},
    ],
)
def test_a_meta_file_cannot_make_arrays_of_anything(folder, change):
    load_tokens(CORPUS, "train", folder)
    path = place(folder) / "meta.json"
    meta = json.loads(path.read_text())
    meta["files"]["tokens.u16"] |= change
    path.write_text(json.dumps(meta))
    with pytest.raises(DataError, match="another program wrote it"):
        read_meta(place(folder))


def test_a_meta_file_cannot_point_outside(folder):
    load_tokens(CORPUS, "train", folder)
    path = place(folder) / "meta.json"
    meta = json.loads(path.read_text())
    meta["files"] = {"../../../text/small-train.u16": meta["files"]["tokens.u16"]}
    path.write_text(json.dumps(meta))
    with pytest.raises(DataError, match="file name"):
        open_checked(place(folder), "small", "train")


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda x: st.lists(x, max_size=3))


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None, max_examples=60
)
@given(key=st.sampled_from(["format", "files", "counts", "sources", "name", "split", "note", "date"]), value=JSON)
def test_any_damage_to_a_meta_file_is_an_error_or_harmless(folder, key, value):
    if not place(folder).exists():
        load_tokens(CORPUS, "train", folder)
        (folder / "meta.good").write_bytes((place(folder) / "meta.json").read_bytes())
    meta = json.loads((folder / "meta.good").read_text())
    (place(folder) / "meta.json").write_text(json.dumps({**meta, key: value}))
    try:
        tokens = load_tokens(CORPUS, "train", folder)
    except DataError:
        return
    assert tokens.tolist() == IDS.tolist()
