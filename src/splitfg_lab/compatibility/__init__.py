"""Which models every estimator trains: measured against plain autograd on the untouched model."""

from splitfg_lab.compatibility._case import Batch, Case
from splitfg_lab.compatibility._hugging_face import cases
from splitfg_lab.compatibility._hugging_face_more import more_cases
from splitfg_lab.compatibility._measure import EXACT, METHODS, UPDATES, Cell, measure
from splitfg_lab.compatibility._page import page
from splitfg_lab.compatibility._record import Row, add_rows, measured_rows, read_rows
from splitfg_lab.compatibility._timm import timm_cases
from splitfg_lab.compatibility._torch import torch_cases

CASES = (*torch_cases(), *cases(), *more_cases(), *timm_cases())
"""Every model class."""

__all__ = [
    "CASES",
    "EXACT",
    "METHODS",
    "UPDATES",
    "Batch",
    "Case",
    "Cell",
    "Row",
    "add_rows",
    "measure",
    "measured_rows",
    "page",
    "read_rows",
]
