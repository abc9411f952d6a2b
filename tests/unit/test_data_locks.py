"""Locks between processes, and the leftovers of killed ones."""

import signal
import subprocess
import sys
import threading

import pytest
from _prepared import CORPUS, IDS, data_folder, listed, place

from splitfg.errors import DataError
from splitfg_lab.data import load_tokens, prepare
from splitfg_lab.data._writing import building, reserved
from splitfg_lab.files import leftovers, locked, temporary_beside

HOLD = """
import sys, time
from pathlib import Path
from splitfg_lab.files import locked
with locked(Path(sys.argv[1]), wait=True) as got:
    print(got, flush=True)
    time.sleep(60)
"""
BUILD = """
import sys, time
from pathlib import Path
from splitfg_lab.data._writing import building, reserved
final = Path(sys.argv[1])
with reserved(final), building(final) as temporary:
    (temporary / "large").write_bytes(bytes(1000))
    print(temporary.name, flush=True)
    time.sleep(60)
"""


def started(code, path):
    """A process that printed its first line and now sleeps."""
    process = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().strip()


def killed(process):
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()


class TestLocked:
    def test_keeps_other_processes_out_until_they_end(self, tmp_path):
        process, got = started(HOLD, tmp_path / "lock")
        try:
            assert got == "True"
            with locked(tmp_path / "lock", wait=False) as mine:
                assert not mine
        finally:
            killed(process)
        with locked(tmp_path / "lock", wait=False) as mine:
            assert mine

    def test_keeps_out_the_same_process_too(self, tmp_path):
        with locked(tmp_path / "lock", wait=False) as first, locked(tmp_path / "lock", wait=False) as second:
            assert (first, second) == (True, False)

    def test_waits_for_another_holder(self, tmp_path):
        order = []

        def hold():
            with locked(tmp_path / "lock", wait=True):
                taken.set()
                threading.Event().wait(0.2)
                order.append("first")

        taken = threading.Event()
        thread = threading.Thread(target=hold)
        thread.start()
        taken.wait()
        with locked(tmp_path / "lock", wait=True) as got:
            order.append("second")
        thread.join()
        assert got
        assert order == ["first", "second"]

    def test_is_released_by_an_error(self, tmp_path):
        with pytest.raises(KeyError), locked(tmp_path / "lock", wait=False):
            raise KeyError
        with locked(tmp_path / "lock", wait=False) as got:
            assert got

    def test_does_not_make_folders(self, tmp_path):
        with pytest.raises(FileNotFoundError), locked(tmp_path / "missing" / "lock", wait=False):
            pass
        assert not (tmp_path / "missing").exists()


class TestLeftovers:
    def test_are_those_of_one_path(self, tmp_path):
        mine, other = temporary_beside(tmp_path / "a[1]"), temporary_beside(tmp_path / "a1")
        for path in (mine, other):
            path.touch()
        assert leftovers(tmp_path / "a[1]") == [mine]

    def test_of_a_killed_process_are_removed_by_the_next_one(self, tmp_path):
        final = tmp_path / "final"
        process, name = started(BUILD, final)
        killed(process)
        assert listed(tmp_path) == [name]
        with reserved(final):
            assert listed(tmp_path) == []

    def test_of_a_killed_prepare_are_removed_by_the_next_one(self, tmp_path):
        folder = data_folder(tmp_path)
        temporary = temporary_beside(place(folder))
        temporary.mkdir(parents=True)
        (temporary / "tokens.u16").write_bytes(b"half")
        prepare(CORPUS, None, folder)
        assert listed(place(folder).parent) == ["train"]

    def test_of_a_kill_between_two_renames_come_back(self, tmp_path):
        folder = data_folder(tmp_path)
        load_tokens(CORPUS, "train", folder)
        (folder / "text" / "small-train.u16").unlink()
        temporary = temporary_beside(place(folder))
        place(folder).rename(temporary.with_suffix(".old"))
        temporary.mkdir()
        with reserved(place(folder)):
            pass
        assert listed(place(folder).parent) == ["train"]
        assert load_tokens(CORPUS, "train", folder).tolist() == IDS.tolist()

    def test_of_a_running_process_stay_and_it_wins(self, tmp_path):
        final = tmp_path / "final"
        with reserved(final), building(final) as temporary:
            waiting = threading.Thread(target=_build_if_missing, args=(final,))
            waiting.start()
            waiting.join(0.2)
            assert waiting.is_alive()
            (temporary / "who").write_text("first")
        waiting.join()
        assert (final / "who").read_text() == "first"
        assert listed(tmp_path) == ["final"]


def _build_if_missing(final):
    with reserved(final):
        if not final.exists():
            with building(final) as temporary:
                (temporary / "who").write_text("second")


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"cannot write .*final"), reserved(tmp_path / "file" / "final"):
        pass


def test_a_loader_that_waited_for_another_process_does_not_prepare_again(tmp_path):
    mine, other = data_folder(tmp_path / "mine"), data_folder(tmp_path / "other")
    prepare(CORPUS, None, other)
    with reserved(place(mine)):
        loader = threading.Thread(target=load_tokens, args=(CORPUS, "train", mine))
        loader.start()
        loader.join(0.2)
        assert loader.is_alive()
        place(other).rename(place(mine))
        finished = place(mine).stat().st_ino
    loader.join()
    assert place(mine).stat().st_ino == finished
