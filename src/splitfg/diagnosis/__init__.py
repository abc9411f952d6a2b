"""Diagnosis of a model: measures how noisy each method is on one batch, and recommends one."""

from splitfg.diagnosis._measure import diagnose, saved_bytes
from splitfg.diagnosis._methods import MethodReport
from splitfg.diagnosis._report import Diagnosis

__all__ = ["Diagnosis", "MethodReport", "diagnose", "saved_bytes"]
