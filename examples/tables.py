"""Tables the scikit-learn way: methods without a backward pass next to ordinary references.

python examples/tables.py
"""

from __future__ import annotations

import argparse

import numpy as np
import pandas as pd
from sklearn.datasets import load_breast_cancer
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from splitfg.recipes import ActivityMethod
from splitfg.sklearn import SplitFGClassifier


def table(rows: int | None) -> tuple[pd.DataFrame, np.ndarray]:
    """Breast-cancer measurements as a DataFrame, with a text column and missing values as tables have them."""
    data = load_breast_cancer(as_frame=True)
    frame, target = data.data.copy(), data.target.to_numpy()
    frame["size"] = np.where(frame["mean radius"] > 14, "large", "small")
    frame.loc[::10, "mean texture"] = np.nan
    return frame.head(rows or len(frame)), target[: rows or len(frame)]


def main(rows: int | None, steps: int, folds: int) -> dict[str, float]:
    X, y = table(rows)
    numbers = X.drop(columns="size").fillna(X.drop(columns="size").mean())
    network = {"steps": steps, "width": 64, "members": 4, "random_state": 0}
    models = {
        "learned feedback (default)": SplitFGClassifier(**network),
        "activity tangents, K = 8": SplitFGClassifier(method="activity_fg", **network),
        "activity tangents, K = 1": SplitFGClassifier(method=ActivityMethod(K=1), **network),
        "Split-FG, K = 8": SplitFGClassifier(method="split_fg", **network),
        "backprop, same network": SplitFGClassifier(method="backprop", **network),
    }
    references = {
        "logistic regression": make_pipeline(StandardScaler(), LogisticRegression()),
        "gradient boosting": HistGradientBoostingClassifier(random_state=0),
    }
    scores = {name: cross_val_score(model, X, y, cv=folds).mean() for name, model in models.items()}
    scores |= {name: cross_val_score(model, numbers, y, cv=folds).mean() for name, model in references.items()}
    for name, score in scores.items():
        print(f"{name:26} {score:6.1%}")
    return scores


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="few rows, steps and folds")
    smoke = parser.parse_args().smoke
    main(rows=150 if smoke else None, steps=20 if smoke else 300, folds=2 if smoke else 5)
