"""What the two estimators share: settings, checks, encoding, training."""

from __future__ import annotations

import difflib
import warnings
from abc import ABC, abstractmethod
from numbers import Integral, Real
from typing import Any, Self

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils import Tags, check_random_state, column_or_1d
from sklearn.utils.validation import check_consistent_length, check_is_fitted, validate_data

from splitfg.errors import shorten
from splitfg.recipes import Adam, TableMethod
from splitfg.recipes.tables import Network, TableRecipe, TableShape, table_methods
from splitfg.sklearn._columns import readable, warn_of_identifiers
from splitfg.sklearn._examples import Examples, check_weight
from splitfg.sklearn._trainer import EarlyStopping, EncodedRows, Trainer, device_problems
from splitfg.sklearn.encoding import Floats, TableEncoding, is_number


class TabularEstimator(BaseEstimator, ABC):
    """A TabM-style network trained on a table by any of the methods; see its two subclasses.

    Args:
        method: Name of a method of :func:`splitfg.recipes.tables.table_methods`, or a recipe with settings of its own.
        steps: Training steps.
        batch_size: Rows per step, at most all of them.
        learning_rate: Adam's.
        rho: Trunk step scale, above 0 and at most 1.
        clip: Joint clipping bound; ``float("inf")`` for none.
        width: Hidden width.
        layers: Hidden layers.
        members: Ensemble members.
        early_stopping: Hold rows out, and stop when the score on them no longer improves; the best weights are kept.
            For ``fit`` alone, and without effect for a readout that stores rows instead of learning step by step.
        validation_fraction: Share of the rows to hold out.
        patience: Scores in a row without improvement after which to stop.
        evaluate_every: Steps between scores; the last step is scored too.
        random_state: Seed of everything random.
        device: Where to compute (``cpu``, ``cuda``, ...).
    """

    def __init__(
        self,
        method: str | TableMethod = "split_fg",
        *,
        steps: int = 300,
        batch_size: int = 256,
        learning_rate: float = 3e-3,
        rho: float = 1.0,
        clip: float = 1.0,
        width: int = 128,
        layers: int = 2,
        members: int = 8,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        patience: int = 5,
        evaluate_every: int = 20,
        random_state: int | np.random.RandomState | None = None,
        device: str = "cpu",
    ) -> None:
        self.method = method
        self.steps = steps
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.rho = rho
        self.clip = clip
        self.width = width
        self.layers = layers
        self.members = members
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.evaluate_every = evaluate_every
        self.random_state = random_state
        self.device = device

    @abstractmethod
    def _begin_target(self, y: NDArray[Any], weight: Floats | None) -> None:
        """Learn from all targets what to call them and how to scale them."""

    @abstractmethod
    def _encode_target(self, y: NDArray[Any]) -> NDArray[Any]:
        """Targets as a learner reads them; refuses what was not there in the beginning."""

    @abstractmethod
    def _check_target(self, y: NDArray[Any]) -> NDArray[Any]:
        """Targets of the right kind, or an error."""

    @abstractmethod
    def _shape(self) -> TableShape:
        """Features and classes."""

    @abstractmethod
    def _held_out(self, y: NDArray[Any], fraction: float, seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Rows to learn from, and rows to hold out."""

    @abstractmethod
    def _validation_score(self, outputs: NDArray[np.float32], y: NDArray[Any], weight: Floats | None) -> float:
        """How good outputs are for encoded targets, more is better."""

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Learn from a table, from scratch.

        The result depends on the set of examples, not on their order. Rows of weight zero are left out and
        whole-number weights are exactly repetitions, up to ten times as many rows; beyond that, and where they are no
        whole numbers, weights say how often a row is drawn.

        Args:
            X: DataFrame or array ``(n, features)``. Numbers are standardised, also those of an object column that
                holds nothing else; NaN is a missing value and becomes the mean. Columns of a DataFrame that hold
                text, categories or booleans become integer codes, the most frequent category first, which are
                standardised too; a text column in which nearly every row has another value gets a warning. Dates,
                times and lists are refused, and so is text in an array.
            y: Targets ``(n,)``.
            sample_weight: Non-negative weights ``(n,)``.
        """
        examples = self._examples(X, y, sample_weight, reset=True).weighted().canonical()
        self._begin(examples, _encoding(examples))
        rows, stopping = self._divided(self._encoded(examples))
        losses, scores = self._trainer.fit(rows, steps=self.steps, batch=self.batch_size, stopping=stopping)
        self.loss_curve_, self.validation_scores_ = losses, scores
        self.n_iter_ = len(losses)
        return self

    def _learn_once(self, X: Any, y: Any, sample_weight: Any) -> Self:
        """One pass over these rows; encoding, scale and classes are those of the first call."""
        begun = hasattr(self, "_trainer")
        if self.early_stopping:
            raise ValueError("partial_fit holds no rows out: set early_stopping=False for it")
        examples = self._examples(X, y, sample_weight, reset=not begun).weighted()
        if begun:
            self._trainer.go_on_with(self._recipe(), device=self.device)
        else:
            encoding = _encoding(examples)
            _check_first(encoding, rows=len(examples))
            self._begin(examples, encoding)
            self.loss_curve_, self.validation_scores_, self.n_iter_ = [], [], 0
        losses = self._trainer.learn_once(self._encoded(examples), batch=self.batch_size)
        self.loss_curve_ = [*self.loss_curve_, *losses]
        self.n_iter_ += len(losses)
        return self

    def _begin(self, examples: Examples, encoding: TableEncoding) -> None:
        recipe = self._recipe()
        self._encoding = encoding
        self._begin_target(examples.target, examples.weight)
        self._seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        self._trainer = Trainer(recipe, self._shape(), seed=self._seed, device=self.device)

    def _encoded(self, examples: Examples) -> EncodedRows:
        x = self._encoding.transform(examples.table)
        return EncodedRows(x, self._encode_target(examples.target), examples.weight)

    def _divided(self, rows: EncodedRows) -> tuple[EncodedRows, EarlyStopping | None]:
        """Rows to learn from, and what is held out for early stopping."""
        if self.early_stopping and self._trainer.stores:
            warnings.warn(
                f"method {self.method!r} stores the rows instead of learning step by step, so that early stopping has"
                " no effect: set early_stopping=False",
                UserWarning,
                stacklevel=3,
            )
        if not self.early_stopping or self._trainer.stores:
            return rows, None
        train, held = self._held_out(rows.y, self.validation_fraction, self._seed)
        weight, held_weight = (None, None) if rows.weight is None else (rows.weight[train], rows.weight[held])

        def score(outputs: NDArray[np.float32]) -> float:
            return self._validation_score(outputs, rows.y[held], held_weight)

        stopping = EarlyStopping(rows.x[held], score, self.evaluate_every, self.patience)
        return EncodedRows(rows.x[train], rows.y[train], weight), stopping

    def _outputs(self, X: Any) -> NDArray[np.float32]:
        check_is_fitted(self)
        return self._trainer.predict(self._encoding.transform(self._table(X, reset=False)))

    def _examples(self, X: Any, y: Any, sample_weight: Any, *, reset: bool) -> Examples:
        self._check_settings()
        if y is None:
            raise ValueError(f"This {type(self).__name__} estimator requires y to be passed, but the target y is None.")
        table = self._table(X, reset=reset)
        if reset:
            warn_of_identifiers(table)
        target = self._check_target(column_or_1d(y, warn=True))
        check_consistent_length(table, target)
        return Examples(table, target, check_weight(sample_weight, len(target)))

    def _table(self, X: Any, *, reset: bool) -> pd.DataFrame:
        """X as a frame with checked columns, read as in ``fit`` unless this is it."""
        return readable(self._frame(X, reset=reset), None if reset else self._encoding.numeric)

    def _frame(self, X: Any, *, reset: bool) -> pd.DataFrame:
        """X as a frame, named as in ``fit``; what scikit-learn refuses is refused."""
        if isinstance(X, pd.DataFrame) and not all(map(is_number, X.dtypes)):
            validate_data(self, X, reset=reset, skip_check_array=True)
            if X.empty:
                raise ValueError(f"Found array with 0 sample(s) (shape={X.shape}) while a minimum of 1 is required.")
            return X.set_axis(self._columns(), axis=1)
        try:
            array = validate_data(self, X, reset=reset, ensure_all_finite="allow-nan")
        except ValueError as error:
            if "convert string" in str(error) or "bytes/strings" in str(error):
                raise ValueError(
                    f"{error} Text is read from pandas DataFrames, where it becomes categories."
                ) from error
            raise
        return pd.DataFrame(array, columns=self._columns())

    def _columns(self) -> list[Any]:
        return list(getattr(self, "feature_names_in_", range(self.n_features_in_)))

    def _recipe(self) -> TableRecipe:
        network = Network(width=self.width, layers=self.layers, members=self.members)
        return TableRecipe(_method(self.method), network, Adam(lr=self.learning_rate), self.rho, self.clip)

    def _check_settings(self) -> None:
        """Refuse settings that cannot work, all at once."""
        whole = ("steps", "batch_size", "width", "layers", "members", "patience", "evaluate_every")
        found = [
            f"{name} must be a positive whole number, got {getattr(self, name)!r}"
            for name in whole
            if not (isinstance(getattr(self, name), Integral) and getattr(self, name) >= 1)
        ]
        for name in ("learning_rate", "clip"):
            if not _number(getattr(self, name)) > 0:
                found.append(f"{name} must be a positive number, got {getattr(self, name)!r}")
        if not 0 < _number(self.rho) <= 1:
            found.append(
                f"rho must be above 0 and at most 1, got {self.rho!r}:"
                ' for a trunk that stays as it is use method="frozen"'
            )
        if not 0 < _number(self.validation_fraction) < 1:
            found.append(f"validation_fraction must be between 0 and 1, got {self.validation_fraction!r}")
        found += device_problems(self.device)
        if found:
            raise ValueError("; ".join(found))

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "_trainer")

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.categorical = True
        return tags


def _method(method: str | TableMethod) -> TableMethod:
    if isinstance(method, str):
        known = table_methods()
        if method not in known:
            near = difflib.get_close_matches(method, known, n=1)
            meant = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"method {method!r} is unknown{meant}: choose one of {', '.join(known)}, or give a recipe")
        return known[method]
    if not isinstance(method, TableMethod):
        raise ValueError(f"method must be a name or a recipe such as SplitFGMethod(K=8), got {type(method).__name__}")
    return method


def _number(value: Any) -> float:
    """The value, or NaN, which is in no range, if it is no number."""
    return float(value) if isinstance(value, Real) else float("nan")


def _encoding(examples: Examples) -> TableEncoding:
    return TableEncoding.fit(examples.table, weight=examples.weight, standardise_codes=True)


def _check_first(encoding: TableEncoding, *, rows: int) -> None:
    """Refuse to begin with rows from which no column can be scaled, and point out those that will be ignored."""
    lasting = "the first call of partial_fit decides means and deviations for good"
    if len(encoding.constant) == encoding.width:
        raise ValueError(
            f"{lasting}, but no column varies in its {rows} sample(s), so that all would be ignored from now on:"
            " give it at least 2 rows that differ, better some hundred typical ones"
        )
    if encoding.constant:
        names = shorten([repr(c) for c in encoding.constant])
        warnings.warn(
            f"{lasting}: columns that do not vary in its {rows} rows are ignored from now on ({names}). Give it more"
            " rows, or drop those columns",
            UserWarning,
            stacklevel=4,
        )
