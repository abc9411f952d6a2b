"""The network model against formulas written out by hand, and the recorded numbers against the claims on the page."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORDS = {
    name: json.loads((ROOT / "benchmarks" / f"{name}.json").read_text(encoding="utf-8"))
    for name in ("ranks", "links", "rank_kills", "stages", "hosts")
}
RANKS, LINKS, STAGES, HOSTS = (RECORDS[name] for name in ("ranks", "links", "stages", "hosts"))


sys.path.insert(0, str(ROOT / "docs" / "_ext"))


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


network = load(ROOT / "benchmarks" / "_network_model.py")


def test_an_all_reduce_takes_the_faster_of_ring_and_doubling():
    slow = network.Link(bandwidth=8e6, latency=0.1)  # one byte a microsecond
    assert network.all_reduce_s(1e6, 1, slow) == 0
    assert network.all_reduce_s(40, 1000, slow) == pytest.approx(10 * (40e-6 + 0.1))  # ten doublings
    fast = network.Link(bandwidth=8e6, latency=0.0)
    assert network.all_reduce_s(1e6, 4, fast) == pytest.approx(2 * 3 / 4)  # a ring sends 1.5 MB, doubling 2 MB
    assert network.step_s(2.0, [1e6, 1e6], 4, fast) == pytest.approx(5.0)
    assert network.shared_step_s(1.0, 1e6, 2, 8e6) == pytest.approx(3.0)


def test_the_all_reduce_of_gloo_is_a_ring_that_waits_twice_a_round():
    link = network.Link(bandwidth=8e6, latency=0.1)
    assert network.gloo_all_reduce_s(48, 1, link) == 0
    assert network.gloo_all_reduce_s(4e6, 4, link) == pytest.approx(6 * (1 + 0.2))
    assert network.gloo_step_s(1.0, [4e6, 4e6], 4, link) == pytest.approx(1 + 2 * 7.2)


def test_the_model_of_gloo_fits_where_links_are_slower_than_the_scheduler():
    slow = [c for c in LINKS["delayed"] if c["latency"] >= 0.02]
    far = [c for c in slow if abs(c["ms"] - c["model_ms"]) > 0.2 * c["model_ms"]]
    assert len(slow) >= 12
    assert len(far) <= 1
    assert not [c for c in far if abs(c["ms"] - c["model_ms"]) > 0.35 * c["model_ms"]]


def test_a_dead_host_gives_its_run_back():
    assert HOSTS["same_end"]
    assert HOSTS["exit_code"] == 0
    assert HOSTS["taken_over_s"] > 0.8 * HOSTS["ttl_s"]
    assert 0 < HOSTS["resumed_from_step"] < HOSTS["steps"]


def test_recorded_bytes_of_the_trunk():
    K, sizes = RANKS["K"], RANKS["sizes"]["small8"]
    cases = {(c["method"], c["ranks"]): c for c in RANKS["scaling"]}
    for ranks in (2, 4):
        ours, theirs = cases["split_fg_local_heads", ranks], cases["ddp_trunk", ranks]
        assert ours["group_bytes"] == 4 * (K + 4)
        assert theirs["group_bytes"] == 4 * sizes["trunk"]
        assert theirs["group_bytes"] > 100_000 * ours["group_bytes"]
        assert cases["split_fg", ranks]["group_bytes"] == 4 * (K + 4) + 4 * sizes["head"]


def test_the_model_fits_the_measured_points():
    limited = [case for case in LINKS["limited"] if case["rate"]]
    unlimited = {case["method"]: case["step_ms"] for case in LINKS["limited"] if not case["rate"]}
    if LINKS["made"]["busy"]:  # other jobs lengthen the computation: only where messages take most of the step
        limited = [c for c in limited if c["model_ms"] > 5 * unlimited[c["method"]]]
    far = [c for c in limited if abs(c["model_ms"] - c["step_ms"]) > 0.25 * c["step_ms"]]
    assert len(limited) >= (2 if LINKS["made"]["busy"] else 8)
    assert not far


def test_the_page_shows_what_is_recorded():
    page = load(ROOT / "docs" / "_ext" / "ranks_page.py").page(RECORDS)
    for case in RANKS["scaling"]:
        assert f"{case['step_ms']:,.0f}" in page
        assert f"{case['group_bytes']:,}" in page
    for case in STAGES["counted"]:
        assert f"| {case['units']:.1f} | {case['formula']} |" in page
    assert "ANOTHER RESULT" not in page


def test_counted_stages_have_no_bubble_on_the_way_back():
    cases = {(c["method"], c["stages"], c["micro_batches"]): c for c in STAGES["counted"]}
    for (method, S, M), case in cases.items():
        back = {"staged": 2 * M, "staged_recompute": 3 * M}.get(method, 2 * (M + S - 1))
        assert case["formula"] == M + S - 1 + back
        assert case["formula"] <= case["units"] < 1.2 * case["formula"]
        if method == "gpipe":
            assert cases["staged", S, M]["units"] < case["units"]


@pytest.mark.parametrize("name", ["ranks", "links", "stages"])
def test_a_record_is_one_finished_run_of_one_revision(name):
    made = RECORDS[name]["made"]
    assert made["git"] is not None
    assert made["git_dirty"] is False
    assert made.get("finished", True)


def test_a_record_is_written_after_every_case(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks._record import Record, options

    args = options("a", None, tmp_path / "a.json", {"one": "one", "two": "two"}, ["--two", "--record"])
    assert (args.parts, args.record, args.busy) == (["two"], tmp_path / "a.json", False)
    record = Record(args.record, {"git": "abc"})
    record.add("two", {"n": 1})
    assert json.loads(args.record.read_text()) == {"made": {"git": "abc", "finished": False}, "two": [{"n": 1}]}
    record.add("two", {"n": 2})
    record.finish(busy=True)
    found = json.loads(args.record.read_text())
    assert found == {"made": {"git": "abc", "finished": True, "busy": True}, "two": [{"n": 1}, {"n": 2}]}
    assert json.loads(capsys.readouterr().out) == found
