"""What every test shares: property tests that draw the same examples on every machine."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

_PRODUCT = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"


def _avoid_broken_tiles() -> None:
    """Keep torch from AMX on virtual machines that announce it and then kill the process that uses it."""
    cpu = Path("/proc/cpuinfo")
    if "ONEDNN_MAX_CPU_ISA" in os.environ or not cpu.exists() or "amx_bf16" not in cpu.read_text(encoding="utf-8"):
        return
    works = subprocess.run([sys.executable, "-c", _PRODUCT], check=False, capture_output=True).returncode == 0
    os.environ["ONEDNN_MAX_CPU_ISA"] = "DEFAULT" if works else "AVX512_CORE_BF16"  # workers inherit it


_avoid_broken_tiles()

if hasattr(signal, "SIGHUP"):  # nohup ignores it, and the processes that tests start would inherit that
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

if os.environ.get("SPLITFG_TEST_DTYPE"):  # make float64
    import torch

    torch.set_default_dtype(getattr(torch, os.environ["SPLITFG_TEST_DTYPE"]))

with contextlib.suppress(ImportError):  # the tests for a GPU need no hypothesis
    from hypothesis import HealthCheck, settings

    # how fast examples come says something about the machine alone
    settings.register_profile(
        "splitfg",
        deadline=None,
        derandomize=True,
        max_examples=30,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("splitfg")


def pytest_collection_finish() -> None:
    """Collect garbage less often, and none among imported modules: it took a tenth of the time of all tests.

    Not where there is a GPU, whose memory garbage holds.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        gc.freeze()
        gc.set_threshold(50_000, 20, 20)


@pytest.fixture(scope="session")
def crew():
    """Four processes that form a gloo group, for all tests of one session."""
    from _crew import Crew

    crew = Crew(4)
    yield crew
    crew.close()


@pytest.fixture(scope="session")
def pair():
    """Two processes that form a gloo group, for all tests of one session."""
    from _crew import Crew

    crew = Crew(2)
    yield crew
    crew.close()
