"""Heads: compute the loss, u = dL/dh and the head's gradient from h and the target."""

from splitfg.heads._base import Head
from splitfg.heads._linear import LinearHead, has_closed_form
from splitfg.heads._losses import CrossEntropy, OutputLoss, RowData, RowEntries, SquaredError
from splitfg.heads._probed import ProbedHead
from splitfg.heads._reverse import ReverseModeHead

__all__ = [
    "CrossEntropy",
    "Head",
    "LinearHead",
    "OutputLoss",
    "ProbedHead",
    "ReverseModeHead",
    "RowData",
    "RowEntries",
    "SquaredError",
    "has_closed_form",
]
