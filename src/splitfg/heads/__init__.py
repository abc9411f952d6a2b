"""Heads: compute the loss, u = dL/dh and the head's gradient from h and the target."""

from splitfg.heads._base import Head
from splitfg.heads._cross_entropy import CrossEntropy
from splitfg.heads._linear import LinearHead, has_closed_form
from splitfg.heads._output_loss import OutputLoss, RowData, RowEntries
from splitfg.heads._probed import ProbedHead
from splitfg.heads._reverse import ReverseModeHead
from splitfg.heads._row_loss import RowLoss
from splitfg.heads._slopes import CurvedLoss, head_slopes
from splitfg.heads._squared_error import SquaredError

__all__ = [
    "CrossEntropy",
    "CurvedLoss",
    "Head",
    "LinearHead",
    "OutputLoss",
    "ProbedHead",
    "ReverseModeHead",
    "RowData",
    "RowEntries",
    "RowLoss",
    "SquaredError",
    "has_closed_form",
    "head_slopes",
]
