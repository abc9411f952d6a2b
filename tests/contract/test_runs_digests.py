"""A run resumes only with the config and the data with which it began; reports record the digests of both."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from _loops import make_folder, run_in, stopping_at
from tiny import TinyConfig
from tiny.run import train

from splitfg_lab.runs import ConfigError, RunContext, RunError, RunFolder, StoppedError, load_checkpoint, to_json
from splitfg_lab.runs.digests import config_digest

CONFIG = TinyConfig()


@pytest.fixture
def stopped(tmp_path: Path) -> RunFolder:
    """A run with a checkpoint."""
    folder = make_folder(tmp_path, CONFIG)
    with pytest.raises(StoppedError):
        run_in(folder, CONFIG, stopping_at(10))
    return folder


def edit(folder: RunFolder, **fields: Any) -> None:
    data = json.loads(folder.config_path.read_text())
    data["config"] |= fields
    folder.config_path.write_text(json.dumps(data))


def test_a_checkpoint_and_a_report_hold_the_digest_of_the_config(stopped: RunFolder) -> None:
    plain = json.dumps(to_json(CONFIG) | {"pause_s": 0}, sort_keys=True)  # 0.0 and 0 are the same number
    expected = f"sha256:{hashlib.sha256(plain.encode()).hexdigest()}"
    checkpoint = load_checkpoint(stopped.path)
    assert checkpoint is not None
    assert checkpoint.state["config_digest"] == expected
    assert run_in(stopped, CONFIG).config_digest == expected


def test_an_edited_config_does_not_resume_and_every_change_is_shown(stopped: RunFolder) -> None:
    edit(stopped, noise=0.7, steps=50, loss="absolute")
    changed = TinyConfig(noise=0.7, steps=50, loss="absolute")
    with pytest.raises(RunError, match="edited after the run began") as caught:
        run_in(stopped, changed)
    for line in ("config.noise: 0.1 -> 0.7", "config.steps: 40 -> 50", 'config.loss: "squared" -> "absolute"'):
        assert line in str(caught.value)
    assert not stopped.finished
    edit(stopped, noise=0.1, steps=40, loss="squared")
    assert run_in(stopped, CONFIG).status == "done"


def test_an_edited_seed_does_not_resume(stopped: RunFolder) -> None:
    data = json.loads(stopped.config_path.read_text())
    stopped.config_path.write_text(json.dumps(data | {"seed": 3}))
    with pytest.raises(RunError, match="seed: 0 -> 3"):
        run_in(stopped, CONFIG)


def test_a_checkpoint_from_before_there_were_digests_resumes(stopped: RunFolder) -> None:
    from splitfg_lab.runs import save_checkpoint

    checkpoint = load_checkpoint(stopped.path)
    assert checkpoint is not None
    state = {k: v for k, v in checkpoint.state.items() if k not in ("run", "config_digest", "data")}
    save_checkpoint(stopped.path, state)
    assert run_in(stopped, CONFIG).status == "done"


def reading(**digests: str) -> Any:
    """A runner that reads data with these digests, and is interrupted at step 10."""
    inner = stopping_at(10)

    def runner(config: TinyConfig, *, seed: int, run: RunContext) -> Any:
        run.use_data(digests)
        return inner(config, seed=seed, run=run)

    return runner


def test_other_data_does_not_resume_and_both_digests_are_shown(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, CONFIG)
    with pytest.raises(StoppedError):
        run_in(folder, CONFIG, reading(train="sha256:aaa", valid="sha256:bbb"))
    with pytest.raises(RunError, match="data changed after the run began") as caught:
        run_in(folder, CONFIG, reading(train="sha256:ccc", valid="sha256:bbb"))
    assert "train: sha256:aaa -> sha256:ccc" in str(caught.value)
    assert "valid" not in str(caught.value)

    def again(config: TinyConfig, *, seed: int, run: RunContext) -> Any:
        run.use_data({"train": "sha256:aaa", "valid": "sha256:bbb"})
        return train(config, seed=seed, run=run)

    assert run_in(folder, CONFIG, again).data_digests == {"train": "sha256:aaa", "valid": "sha256:bbb"}


def test_an_edited_report_is_not_believed(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, CONFIG)
    run_in(folder, CONFIG)
    path = folder.path / "report.json"
    data = json.loads(path.read_text())
    data["config"]["noise"] = 0.7
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match="edited after the run"):
        folder.report()
    del data["config_digest"]  # a report from before there were digests
    path.write_text(json.dumps(data))
    assert folder.report().config["noise"] == 0.7


def test_a_digest_depends_on_values_and_not_on_how_they_are_written() -> None:
    assert config_digest({"a": 1, "b": [2.0]}) == config_digest({"b": [2], "a": 1.0})
    assert config_digest({"a": 1}) != config_digest({"a": 2})
    assert config_digest({"a": 1}) != config_digest({"b": 1})
