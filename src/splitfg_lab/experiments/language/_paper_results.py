"""The paper's numbers of the language experiments, and cells that show them next to ours."""

from __future__ import annotations

from splitfg_lab.experiments.language._presets import PURE_FG_RATES, split_fg
from splitfg_lab.experiments.spec import Cell, Paper, Row, Table

CORPUS = (
    "Our runs are trained on the Wikipedia stand-in for WikiText-103's training split (as many tokens, another text),"
    " the paper's on WikiText-103; both are evaluated on WikiText-103's own validation split."
)
MAIN, NAIVE, BEST = split_fg(4, 0.03), split_fg(4, 1.0), split_fg(4, 0.1)
BIGRAM_PAPER = 198.12
"""The paper's perplexity of the interpolated bigram."""

MAIN_ROWS = (  # label, preset, the paper's NLL and PPL
    ("Backprop + Adam", "backprop", 5.0080, 149.61),
    ("Backprop, tuned: AdamW", "backprop-tuned", None, 75.5),
    ("Backprop, tuned: Adam, eps 1e-06", "tuned-rho0.3", None, 75.5),
    ("Forward gradient + Adam, K = 1", "fg-adam-k1", 10.5999, 40128.90),
    ("Forward gradient + Adam, K = 4, tuned rate", "fg-adam-k4", 7.9673, 2884.97),
    ("Forward gradient + SGD, K = 1", "fg-sgd-k1", 10.8274, 50385.05),
    ("Antithetic ES + Adam, K = 1", "es-adam-k1", 9.4012, 12103.11),
    ("Hopfield memory (kNN-LM), 4,096 windows", "knn_lm", 7.4466, 1714.02),
    ("Unigram", "unigram", 7.4140, 1659.03),
    ("Interpolated bigram", "bigram", 5.2889, BIGRAM_PAPER),
    ("Split-FG, K = 4, naive trunk step", NAIVE, 7.4578, 1733.36),
    ("Split-FG, K = 8, naive trunk step", split_fg(8, 1.0), None, 1656.7),
    ("Frozen trunk, exact head", "frozen", 6.5037, 667.64),
    ("Split-FG, K = 4, rho = 0.03", MAIN, 5.9577, 386.70),
    ("Split-FG, K = 4, rho = 0.1", BEST, None, 365.0),
)
CORE_ROWS = (  # label, preset, the paper's PPL and relative factor, interpretation
    ("Split-FG, K = 4, rho = 0.03", MAIN, 386.7, 1.0, "main method"),
    ("Undo step scaling", NAIVE, 1733.4, 4.5, "noise-blind steps"),
    ("Freeze the trunk", "frozen", 667.6, 1.7, "trunk training helps"),
    ("Remove the split: pure FG, K = 4, tuned rate", "fg-adam-k4", 2885.0, 7.5, "matched split attribution"),
    ("Remove the split: pure FG, K = 1", "fg-adam-k1", 40128.9, 104.0, "untuned baseline"),
    ("Remove the split: pure FG + SGD, K = 1", "fg-sgd-k1", 50385.1, 130.0, "at the uniform floor"),
    ("ES instead of JVP, K = 1", "es-adam-k1", 12103.1, 31.0, "zeroth-order comparison"),
)
RHO_PAPER = {
    0.003: (716.1, 622.7),
    0.01: (681.8, 514.9),
    0.03: (623.3, 386.7),
    0.1: (541.9, 365.0),
    0.3: (677.9, 633.1),
}
FROZEN_PAPER = (816.0, 667.6)
K_PAPER = {1: (546.8, 6.304), 2: (437.6, 6.081), 4: (386.7, 5.958), 8: (361.5, 5.890)}
PURE_PAPER = dict(zip(PURE_FG_RATES, (21319.0, 8026.0, 4544.0, 6111.0, 16510.0, 32543.0), strict=True))
OPTIMIZER_ROWS = (
    ("Muon", "split_fg-muon", 382.3, 5.946),
    ("Adam", MAIN, 386.7, 5.958),
    ("AdamW", "split_fg-adamw", 398.8, 5.988),
    ("SGD", "split_fg-sgd", 44917.9, 10.713),
)


def perplexity(preset: str, paper: float | None = None) -> Cell:
    """Return a cell of validation perplexity."""
    return Cell(preset, "val_ppl", None if paper is None else Paper(paper))


def log_loss(preset: str, paper: float | None = None) -> Cell:
    """Return a cell of validation loss."""
    return Cell(preset, "val_nll", None if paper is None else Paper(paper), decimals=4)


def ratio(preset: str, over: str, paper: float | None, *, decimals: int = 1) -> Cell:
    """Return a cell of a perplexity over another preset's."""
    return Cell(preset, "val_ppl", None if paper is None else Paper(paper), decimals, over)


def distance(preset: str) -> Cell:
    """Return a cell of the distance that the trunk moved."""
    return Cell(preset, "trunk_moved", decimals=2, ranked=False)


def table(
    key: str, title: str, columns: tuple[str, ...], rows: list[Row], note: str = "", *, collapse: bool = False
) -> Table:
    """Return a table of perplexities."""
    return Table(key, title, columns, tuple(rows), better="lower", note=note, collapse=collapse)
