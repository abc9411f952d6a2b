"""The base class of the two estimators: settings, encoding, training."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from typing import Any, Self

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.sparse import issparse
from sklearn.base import BaseEstimator
from sklearn.utils import Tags, check_random_state, column_or_1d
from sklearn.utils.validation import check_consistent_length, check_is_fitted, validate_data

from splitfg.errors import shorten
from splitfg.recipes import Adam, TableMethod
from splitfg.recipes.tables import NetworkRecipe, TableRecipe, TableShape
from splitfg.sklearn._columns import readable, warn_of_identifiers
from splitfg.sklearn._examples import Examples, check_weight
from splitfg.sklearn._progress import ProgressLines
from splitfg.sklearn._settings import DEFAULT_METHOD, method_recipe, network_recipe, setting_problems
from splitfg.sklearn._sparse import SparseEncoding, Table, compressed, encode, fit_encoding
from splitfg.sklearn._trainer import EarlyStopping, EncodedRows, Trainer, device_problems
from splitfg.sklearn.encoding import Floats, TableEncoding, is_number


class TabularEstimator(BaseEstimator, ABC):
    """Settings, encoding and training of the two estimators; their docstrings list the arguments."""

    def __init__(
        self,
        method: str | TableMethod = DEFAULT_METHOD,
        *,
        steps: int = 300,
        batch_size: int = 256,
        learning_rate: float = 3e-3,
        rho: float = 1.0,
        clip: float = 1.0,
        network: str | NetworkRecipe = "tabm",
        width: int = 128,
        layers: int = 2,
        members: int = 8,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        patience: int = 5,
        evaluate_every: int = 20,
        verbose: bool = False,
        random_state: int | np.random.RandomState | None = None,
        device: str = "cpu",
    ) -> None:
        self.method = method
        self.steps = steps
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.rho = rho
        self.clip = clip
        self.network = network
        self.width = width
        self.layers = layers
        self.members = members
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.evaluate_every = evaluate_every
        self.verbose = verbose
        self.random_state = random_state
        self.device = device

    @abstractmethod
    def _begin_target(self, y: NDArray[Any], weight: Floats | None) -> None:
        """Set the classes, or the scale of the values, from all targets."""

    @abstractmethod
    def _encode_target(self, y: NDArray[Any]) -> NDArray[Any]:
        """Return the targets as a learner reads them; raises an error for unknown classes."""

    @abstractmethod
    def _check_target(self, y: NDArray[Any]) -> NDArray[Any]:
        """Return the targets, or raise an error if they are of the wrong kind."""

    @abstractmethod
    def _shape(self) -> TableShape:
        """Return the features and classes."""

    @abstractmethod
    def _row_weight(self, y: NDArray[Any], weight: Floats | None) -> Floats | None:
        """Return the weight of every row, class weights included; ``None`` if all count the same."""

    @abstractmethod
    def _held_out(self, y: NDArray[Any], fraction: float, seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the rows to train on, and the rows to hold out."""

    @abstractmethod
    def _validation_score(self, outputs: NDArray[np.float32], y: NDArray[Any], weight: Floats | None) -> float:
        """Return the score of outputs for encoded targets, higher is better."""

    @property
    @abstractmethod
    def _score_name(self) -> str:
        """Name of the validation score."""

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train a new model on a table.

        The result depends on the set of examples, not on their order. Rows of weight zero are dropped. Whole-number
        weights are exactly repetitions, up to ten times as many rows; beyond that, and for other numbers, a weight
        sets how often a row is drawn.

        Args:
            X: DataFrame, array or scipy sparse matrix of shape ``(n, features)``. Numbers are standardised, also those
                of an object column that holds nothing else; NaN is a missing value and becomes the mean. Columns of a
                DataFrame that hold text, categories or booleans become integer codes, the most frequent category
                first, which are standardised too. A sparse matrix is standardised as the dense array is and stays
                sparse: batches become dense one at a time. Its rows are shuffled in another order.
            y: Targets of shape ``(n,)``.
            sample_weight: Non-negative weights of shape ``(n,)``.

        Raises:
            ValueError: Settings, table, targets or weights are invalid; dates, times and lists must become numbers
                first, and text must come in a DataFrame.
        """
        examples = self._examples(X, y, sample_weight, reset=True).weighted().canonical()
        self._begin(examples, self._fitted_encoding(examples))
        rows, stopping = self._divided(self._encoded(examples))
        progress = ProgressLines(self.steps, self.evaluate_every, self._score_name) if self.verbose else None
        losses, scores = self._trainer.fit(
            rows, steps=self.steps, batch=self.batch_size, stopping=stopping, progress=progress
        )
        self.loss_curve_, self.validation_scores_ = losses, scores
        self.n_iter_ = len(losses)
        return self

    def _learn_once(self, X: Any, y: Any, sample_weight: Any) -> Self:
        """Go over the rows once; encoding, scale and classes are those of the first call."""
        begun = hasattr(self, "_trainer")
        if self.early_stopping:
            raise ValueError("partial_fit holds no rows out: set early_stopping=False for it")
        examples = self._examples(X, y, sample_weight, reset=not begun).weighted()
        if begun:
            self._trainer.go_on_with(self._recipe(), device=self.device)
        else:
            encoding = self._fitted_encoding(examples)
            _check_first(encoding, rows=len(examples))
            self._begin(examples, encoding)
            self.loss_curve_, self.validation_scores_, self.n_iter_ = [], [], 0
        losses = self._trainer.learn_once(self._encoded(examples), batch=self.batch_size)
        if self.verbose:
            print(f"pass over {len(examples)} rows: {len(losses)} steps, loss {np.mean(losses):.4f}", flush=True)
        self.loss_curve_ = [*self.loss_curve_, *losses]
        self.n_iter_ += len(losses)
        return self

    def _begin(self, examples: Examples, encoding: TableEncoding | SparseEncoding) -> None:
        recipe = self._recipe()
        self._encoding = encoding
        self._begin_target(examples.target, examples.weight)
        self._seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        self._trainer = Trainer(recipe, self._shape(), seed=self._seed, device=self.device)

    def _encoded(self, examples: Examples) -> EncodedRows:
        x = encode(self._encoding, examples.table)
        return EncodedRows(x, self._encode_target(examples.target), examples.weight)

    def _fitted_encoding(self, examples: Examples) -> TableEncoding | SparseEncoding:
        return fit_encoding(examples.table, self._columns(), examples.weight)

    def _divided(self, rows: EncodedRows) -> tuple[EncodedRows, EarlyStopping | None]:
        """Return the rows to train on, and the rows held out for early stopping."""
        if self.early_stopping and self._trainer.stores:
            warnings.warn(
                f"method {self.method!r} stores the rows instead of training step by step, so early stopping has no"
                " effect: set early_stopping=False",
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
        return self._trainer.predict(encode(self._encoding, self._table(X, reset=False)))

    def _examples(self, X: Any, y: Any, sample_weight: Any, *, reset: bool) -> Examples:
        self._check_settings()
        if y is None:
            raise ValueError(f"This {type(self).__name__} estimator requires y to be passed, but the target y is None.")
        table = self._table(X, reset=reset)
        if reset and isinstance(table, pd.DataFrame):
            warn_of_identifiers(table)
        target = self._check_target(column_or_1d(y, warn=True))
        check_consistent_length(table, target)
        return Examples(table, target, self._row_weight(target, check_weight(sample_weight, len(target))))

    def _table(self, X: Any, *, reset: bool) -> Table:
        """Return X as a frame with checked columns, or as compressed rows; ``reset`` in ``fit`` alone."""
        table = self._read(X, reset=reset)
        if not isinstance(table, pd.DataFrame):
            return table
        return readable(table, None if reset else self._encoding.numeric)

    def _read(self, X: Any, *, reset: bool) -> Table:
        """Return X as a frame named as in ``fit``, or as compressed rows, once scikit-learn accepts it."""
        if isinstance(X, pd.DataFrame) and not all(map(is_number, X.dtypes)):
            validate_data(self, X, reset=reset, skip_check_array=True)
            if X.empty:
                raise ValueError(f"Found array with 0 sample(s) (shape={X.shape}) while a minimum of 1 is required.")
            return X.set_axis(self._columns(), axis=1)
        try:
            array = validate_data(self, X, reset=reset, accept_sparse="csr", ensure_all_finite="allow-nan")
        except ValueError as error:
            if "convert string" in str(error) or "bytes/strings" in str(error):
                raise ValueError(f"{error} Put text into a pandas DataFrame, where it becomes categories.") from error
            raise
        return compressed(array) if issparse(array) else pd.DataFrame(array, columns=self._columns())

    def _columns(self) -> list[Any]:
        return list(getattr(self, "feature_names_in_", range(self.n_features_in_)))

    def _recipe(self) -> TableRecipe:
        network = network_recipe(self.network, width=self.width, layers=self.layers, members=self.members)
        return TableRecipe(method_recipe(self.method), network, Adam(lr=self.learning_rate), self.rho, self.clip)

    def _check_settings(self) -> None:
        """Raise an error that lists every invalid number and device."""
        found = setting_problems(vars(self)) + device_problems(self.device)
        if found:
            raise ValueError("; ".join(found))

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "_trainer")

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.categorical = True
        tags.input_tags.sparse = True
        return tags


def _check_first(encoding: TableEncoding | SparseEncoding, *, rows: int) -> None:
    """Raise an error if no column varies in the first rows, and warn of those that do not."""
    lasting = "the first call of partial_fit sets means and deviations for all later calls"
    if len(encoding.constant) == encoding.width:
        raise ValueError(
            f"{lasting}, but no column varies in its {rows} sample(s), so that the model would ignore all of them:"
            " give it at least 2 rows that differ, better some hundred typical ones"
        )
    if encoding.constant:
        names = shorten([repr(c) for c in encoding.constant])
        warnings.warn(
            f"{lasting}: the model ignores columns that do not vary in its {rows} rows ({names}). Give it more rows,"
            " or drop those columns",
            UserWarning,
            stacklevel=4,
        )
