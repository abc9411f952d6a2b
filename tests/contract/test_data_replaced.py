"""Raw files in the data folder that are no longer those the data was prepared from."""

import dataclasses
import errno
import hashlib
import json
import multiprocessing
import os

import numpy as np
import pytest
from _prepared import CORPUS, IDS, data_folder, listed, load_sum, place

from splitfg.errors import DataError
from splitfg_lab.data import FileSet, PreparedAgainWarning, _origin as origin_module, load_tokens, prepare
from splitfg_lab.data._folder import DataFolder
from splitfg_lab.data._prepare import ensure
from splitfg_lab.data._writing import digest_of


@pytest.fixture
def folder(tmp_path):
    return data_folder(tmp_path)


NEW = IDS[::-1].copy()


def raw(folder):
    return folder / "text" / "small-train.u16"


class TestReplaced:
    """Raw files in the data folder that are no longer those the data was prepared from."""

    def test_another_raw_file_is_prepared_again_with_a_warning(self, folder):
        old = load_tokens(CORPUS, "train", folder)
        raw(folder).write_bytes(NEW.tobytes())
        with pytest.warns(
            PreparedAgainWarning, match=r"small-train\.u16 changed since small train was prepared from it"
        ):
            assert load_tokens(CORPUS, "train", folder).tolist() == NEW.tolist()
        assert load_tokens(CORPUS, "train", folder).tolist() == NEW.tolist()
        assert old.tolist() == IDS.tolist(), "whoever reads the old data goes on with it"
        assert listed(place(folder).parent) == ["train"]

    def test_a_file_that_is_only_newer_is_hashed_once(self, folder, monkeypatch):
        load_tokens(CORPUS, "train", folder)
        hashed = []
        monkeypatch.setattr(origin_module, "digest_of", lambda path: hashed.append(path.name) or digest_of(path))
        load_tokens(CORPUS, "train", folder)
        assert hashed == []
        os.utime(raw(folder), ns=(1, 1))
        for _ in range(3):
            assert load_tokens(CORPUS, "train", folder).tolist() == IDS.tolist()
        assert hashed == ["small-train.u16"]
        raw(folder).write_bytes(NEW.tobytes())
        with pytest.warns(PreparedAgainWarning):
            load_tokens(CORPUS, "train", folder)

    def test_a_record_without_stamps_tells_by_name_and_hash(self, folder, monkeypatch):
        load_tokens(CORPUS, "train", folder)
        path = place(folder) / "meta.json"
        meta = json.loads(path.read_text())
        meta["sources"] = [{name: source[name] for name in ("file", "sha256")} for source in meta["sources"]]
        path.write_text(json.dumps(meta))
        hashed = []
        monkeypatch.setattr(origin_module, "digest_of", lambda path: hashed.append(path.name) or digest_of(path))
        for _ in range(2):
            load_tokens(CORPUS, "train", folder)
        assert hashed == ["small-train.u16"]
        raw(folder).write_bytes(NEW.tobytes())
        with pytest.warns(PreparedAgainWarning):
            assert load_tokens(CORPUS, "train", folder).tolist() == NEW.tolist()

    def test_raw_files_that_are_gone_are_not_missed(self, folder):
        load_tokens(CORPUS, "train", folder)
        raw(folder).unlink()
        assert load_tokens(CORPUS, "train", folder).tolist() == IDS.tolist()

    def test_what_was_given_by_hand_stays(self, folder, tmp_path):
        given = tmp_path / "small-train.u16"
        given.write_bytes(NEW.tobytes())
        prepare(CORPUS, given, folder)
        assert load_tokens(CORPUS, "train", folder).tolist() == NEW.tolist(), "whatever lies in the data folder"
        given.unlink()
        assert load_tokens(CORPUS, "train", folder).tolist() == NEW.tolist()

    def test_a_file_in_the_place_of_one_that_is_gone(self, folder):
        data = dataclasses.replace(CORPUS, raw=(*CORPUS.raw, "text/{split}-small.bin"))
        load_tokens(data, "train", folder)
        (folder / "text" / "train-small.bin").write_bytes(NEW.tobytes())
        assert load_tokens(data, "train", folder).tolist() == IDS.tolist(), "the one it was made from is still there"
        raw(folder).unlink()
        with pytest.warns(PreparedAgainWarning, match=r"train-small\.bin"):
            assert load_tokens(data, "train", folder).tolist() == NEW.tolist()

    def test_a_folder_that_was_emptied(self, tmp_path):
        known = (("a", "sha256:" + hashlib.sha256(b"x").hexdigest()),)
        files = FileSet(name="files", title="", raw=("here",), files=known)
        (tmp_path / "here").mkdir()
        (tmp_path / "here" / "a").write_bytes(b"x")
        at = DataFolder.at(tmp_path)
        ensure(files, "", at)
        (tmp_path / "here" / "a").unlink()
        ensure(files, "", at)

    def test_a_replacement_that_is_not_the_data_is_an_error_and_nothing_is_lost(self, folder):
        load_tokens(CORPUS, "train", folder)
        raw(folder).write_bytes(b"\x00")
        with pytest.warns(PreparedAgainWarning), pytest.raises(DataError, match="cannot be prepared"):
            load_tokens(CORPUS, "train", folder)
        raw(folder).write_bytes(IDS.tobytes())
        assert load_tokens(CORPUS, "train", folder).tolist() == IDS.tolist()

    def test_a_raw_file_that_cannot_be_read_is_as_good_as_gone(self, folder, monkeypatch):
        load_tokens(CORPUS, "train", folder)
        os.utime(raw(folder), ns=(1, 1))

        def refused(_):
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(origin_module, "digest_of", refused)
        assert load_tokens(CORPUS, "train", folder).tolist() == IDS.tolist()

    def test_many_processes_may_find_out_together(self, folder):
        load_tokens(CORPUS, "train", folder)
        raw(folder).write_bytes((NEW // 2).tobytes())
        with multiprocessing.get_context("spawn").Pool(3) as pool:
            sums = pool.map(load_sum, [folder] * 6)
        assert set(sums) == {int((NEW // 2).sum(dtype=np.int64))}
        assert listed(place(folder).parent) == ["train"]

    @pytest.mark.parametrize(
        "mark", ["[]", '{"sources": 3}', '{"sources": {"x": 3}}', '{"sources": {"x": [1e999, 1]}}']
    )
    def test_any_damage_to_what_was_remembered_is_harmless(self, folder, mark):
        load_tokens(CORPUS, "train", folder)
        (place(folder) / "checked.json").write_text(mark)
        os.utime(raw(folder), ns=(1, 1))
        assert load_tokens(CORPUS, "train", folder).tolist() == IDS.tolist()
