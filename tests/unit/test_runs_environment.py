"""The revision a run is recorded with: git's, else the one that the environment states, else none; and its device."""

import subprocess
from pathlib import Path

import pytest
import torch

from splitfg_lab.runs import RunError
from splitfg_lab.runs.environment import Revision, resolve_device, side_by_side, source_revision

ROOT = Path(__file__).parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def without_git(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("without_git")
class TestWithoutGit:
    @pytest.mark.parametrize(
        ("stated", "expected"),
        [
            (COMMIT, Revision(COMMIT, dirty=False)),
            (f"{COMMIT}-dirty", Revision(COMMIT, dirty=True)),
            ("0123abc", Revision("0123abc", dirty=False)),
            ("", None),
        ],
    )
    def test_the_environment_states_it(self, monkeypatch, stated, expected):
        monkeypatch.setenv("SPLITFG_REVISION", stated)
        assert source_revision() == expected

    def test_nobody_states_it(self, monkeypatch):
        monkeypatch.delenv("SPLITFG_REVISION", raising=False)
        assert source_revision() is None

    @pytest.mark.parametrize(
        "stated", ["main", "v0.1.0", "0123ab", f"{COMMIT}-", f"{COMMIT}-dirty-dirty", "-dirty", f"{COMMIT}\n", "a" * 65]
    )
    def test_what_is_no_revision_is_refused(self, monkeypatch, stated):
        monkeypatch.setenv("SPLITFG_REVISION", stated)
        with pytest.raises(RunError, match=r"SPLITFG_REVISION is .* not a commit: set it to"):
            source_revision()


def test_a_gpu_beyond_the_last_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(RunError, match="--device cuda:2: torch sees 2 GPUs here, cuda:0 to cuda:1"):
        resolve_device("cuda:2")


def test_git_is_believed_before_the_environment(monkeypatch):
    asked = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    if asked.returncode != 0:
        pytest.skip("needs a checkout, and git")
    monkeypatch.setenv("SPLITFG_REVISION", COMMIT)
    found = source_revision()
    assert found is not None
    assert found.commit == asked.stdout.strip()


def test_runs_know_how_many_share_the_machine_only_where_told(monkeypatch):
    monkeypatch.delenv("SPLITFG_SIDE_BY_SIDE", raising=False)
    assert side_by_side() is None
    monkeypatch.setenv("SPLITFG_SIDE_BY_SIDE", "10")
    assert side_by_side() == 10


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_a_count_of_runs_that_is_no_count_raises(monkeypatch, text):
    monkeypatch.setenv("SPLITFG_SIDE_BY_SIDE", text)
    with pytest.raises(RunError, match="SPLITFG_SIDE_BY_SIDE"):
        side_by_side()
