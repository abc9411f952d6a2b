"""Tuning an ONNX network with scikit-learn's contract."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from splitfg.errors import SplitError, raise_if
from splitfg.heads import CrossEntropy, LinearHead, OutputLoss, SquaredError
from splitfg.onnx._adapters import Adapter
from splitfg.onnx._inputs import divided, inputs_of, mixing_problems, require_other_file, row_problems
from splitfg.onnx._save import save, with_head
from splitfg.onnx._trunk import OnnxTrunk
from splitfg.onnx._tuning import Rows, Settings, Tuning, predict
from splitfg.splitting import Split


class OnnxEstimator(BaseEstimator, ABC):
    """Settings and training of the two estimators; their docstrings list the arguments."""

    def __init__(
        self,
        model: str | Path | bytes,
        *,
        method: str = "learned_feedback",
        cut: str | None = None,
        train: str | Sequence[str] | None = None,
        adapters: Adapter | None = None,
        steps: int = 300,
        batch_size: int = 64,
        learning_rate: float = 1e-3,
        rho: float = 1.0,
        K: int = 8,
        validation_fraction: float = 0.15,
        patience: int = 4,
        evaluate_every: int = 25,
        threads: int | None = None,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.model = model
        self.method = method
        self.cut = cut
        self.train = train
        self.adapters = adapters
        self.steps = steps
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.rho = rho
        self.K = K
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.evaluate_every = evaluate_every
        self.threads = threads
        self.random_state = random_state

    @abstractmethod
    def _encode(self, y: NDArray[Any]) -> Tensor:
        """Set the classes or the scale of the values, and return the targets for a head."""

    @abstractmethod
    def _loss(self) -> OutputLoss:
        """Return the loss."""

    @abstractmethod
    def _outputs(self) -> int:
        """Return the number of outputs."""

    @abstractmethod
    def _finish_head(self, layer: nn.Linear) -> None:
        """Undo the scaling of targets in the trained head."""

    @abstractmethod
    def _classes(self) -> list[Any] | None:
        """Return the classes; ``None`` for values."""

    def fit(self, X: Any, y: Any) -> Self:
        """Tune the network of the file; the file itself stays as it is.

        Args:
            X: Array with a row for every example, as the network reads it; for several inputs a dict by name.
            y: Targets of shape ``(n,)``.

        Raises:
            SplitError: If the file, the data or a setting cannot work.
        """
        tuning = self.prepare(X, y)
        tuning.begin()
        while not tuning.done:
            tuning.step()
        return self.end(tuning)

    def prepare(self, X: Any, y: Any) -> Tuning:
        """Do what :meth:`fit` does before it trains, for callers with their own loop."""
        seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        settings = Settings(
            self.method, self.steps, self.batch_size, self.learning_rate, self.rho, self.K,
            self.evaluate_every, self.patience, seed,
        )  # fmt: skip
        trunk = OnnxTrunk(self.model, cut=self.cut, train=self.train, adapters=self.adapters, threads=self.threads)
        x = inputs_of(trunk, X)
        target = np.asarray(y)
        raise_if(row_problems(x, target, self.validation_fraction) + self._trunk_problems(trunk))
        raise_if(mixing_problems(trunk, x) if self.method.startswith("activity") else [])
        encoded = self._encode(target)
        torch_state = torch.get_rng_state()
        torch.manual_seed(seed)  # the head's initial weights
        head = LinearHead(nn.Linear(trunk.width(*(t[:2] for t in x)), self._outputs()), loss=self._loss())
        torch.set_rng_state(torch_state)
        rows, held = divided(Rows(x, encoded), self.validation_fraction, seed, stratify=self._classes() is not None)
        self.split_ = Split(trunk, head)
        return Tuning(self.split_, rows, held, settings)

    def _trunk_problems(self, trunk: OnnxTrunk) -> list[str]:
        if self.method == "head" or any(p.requires_grad for p in trunk.parameters()):
            return []
        cures = 'train a head alone (method="head"), add adapters, or cut elsewhere'
        return [f"{trunk.file.name} has no weight to train below {trunk.cut}: {cures}"]

    def end(self, tuning: Tuning) -> Self:
        """Do what :meth:`fit` does after the last step."""
        tuning.finish()
        (layer,) = self.split_.head.layers  # type: ignore[misc]
        self._finish_head(layer)
        trunk = self.split_.trunk
        assert isinstance(trunk, OnnxTrunk)
        self.loss_curve_, self.validation_scores_ = tuning.losses, tuning.scores
        self.n_iter_ = len(tuning.losses)
        self.n_features_in_ = int(np.prod(tuning.train.x[0].shape[1:]))
        self.inferences_, self.engine_seconds_ = trunk.counts.inferences, trunk.counts.seconds
        self._example = tuning.train.part(slice(0, 8)).x
        return self

    def decision_function(self, X: Any) -> NDArray[np.float32]:
        """Return the outputs of the head, shape ``(n, outputs)``."""
        check_is_fitted(self, "loss_curve_")
        trunk = self.split_.trunk
        assert isinstance(trunk, OnnxTrunk)
        found: NDArray[np.float32] = predict(self.split_, inputs_of(trunk, X)).numpy()
        return found

    def save(self, path: str | Path) -> None:
        """Write the tuned network, head included, as an ONNX file that plain ONNX Runtime runs.

        Raises:
            SplitError: If ``path`` is the file that was tuned, or the graph would give other outputs.
            OSError: If it cannot be written; a file that was there before is intact.
        """
        check_is_fitted(self, "loss_curve_")
        require_other_file(self.model, path)
        trunk, head = self.split_.trunk, self.split_.head
        assert isinstance(trunk, OnnxTrunk)
        assert isinstance(head, LinearHead)
        outputs = predict(self.split_, self._example)
        try:
            save(with_head(trunk, head, self._classes()), path, self._example, outputs)
        except SplitError:  # merged weights can round differently
            if self.adapters is None:
                raise
            save(with_head(trunk, head, self._classes(), merged=False), path, self._example, outputs)


class OnnxClassifier(ClassifierMixin, OnnxEstimator):
    """Tunes a network of an ONNX file for classes, without a backward pass, inside ONNX Runtime.

    A new linear head is fitted to h; then head and trunk train together. The head's gradient is exact.

    Args:
        model: Path of the file, or its bytes; never written to.
        method: ``learned_feedback`` (two inferences a row), ``activity`` (2K + 1), ``activity_and_feedback``,
            ``weights`` (2K + 1), or ``head`` for the head alone.
        cut: Name of the tensor h that the head reads; by default what the last Gemm or MatMul reads.
        train: Names or globs of initialisers to train; by default all that learned feedback reaches.
        adapters: Adapters for weights that cannot be trained in place, such as int8 ones.
        steps: Largest number of steps.
        batch_size: Rows per step.
        learning_rate: Of Adam, for the head.
        rho: Factor on the trunk's learning rate.
        K: Noises a step, where the method has any.
        validation_fraction: Share of the rows for early stopping; 0 for none.
        patience: Evaluations without a better score before training stops.
        evaluate_every: Steps between evaluations.
        threads: Threads of the engine.
        random_state: Seed.

    Attributes:
        classes_: The classes.
        validation_scores_: Accuracies on held-out rows, first that of the head alone.
        inferences_: Rows run forward.

    Example:
        >>> import numpy as np
        >>> from splitfg.onnx import OnnxClassifier, example_model
        >>> rng = np.random.default_rng(0)
        >>> X = rng.standard_normal((200, 4)).astype(np.float32)
        >>> y = np.where(X[:, 0] * X[:, 1] > 0, "same", "different")
        >>> tuned = OnnxClassifier(example_model(), steps=50, random_state=0).fit(X, y)
        >>> tuned.predict(X[:2]).shape
        (2,)
    """

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the most probable class of every row."""
        best = self.decision_function(X).argmax(1)
        return np.asarray(self.classes_[best])

    def predict_proba(self, X: Any) -> NDArray[np.float32]:
        """Return the probabilities, shape ``(n, classes)``."""
        found: NDArray[np.float32] = torch.tensor(self.decision_function(X)).softmax(1).numpy()
        return found

    def _encode(self, y: NDArray[Any]) -> Tensor:
        if y.dtype.kind == "f" and not np.all(y == np.round(y)):
            raise SplitError(["targets are fractions, which are no classes: use OnnxRegressor, or `--values`"])
        try:
            self.classes_, indices = np.unique(y, return_inverse=True)
        except TypeError as error:
            cure = "drop rows without a target, and give all targets one type"
            raise SplitError([f"targets cannot be sorted ({error}): {cure}"]) from error
        if len(self.classes_) < 2:
            raise SplitError([f"the target has {len(self.classes_)} class: two or more are needed"])
        return torch.as_tensor(indices)

    def _loss(self) -> OutputLoss:
        return CrossEntropy()

    def _outputs(self) -> int:
        return len(self.classes_)

    def _finish_head(self, layer: nn.Linear) -> None:
        """Do nothing: classes have no scale."""

    def _classes(self) -> list[Any]:
        return list(self.classes_)


class OnnxRegressor(RegressorMixin, OnnxEstimator):
    """Tunes a network of an ONNX file for a value, without a backward pass, inside ONNX Runtime.

    Arguments as in :class:`OnnxClassifier`; scores are R².

    Attributes:
        scale_: Mean and standard deviation of the training targets.

    Example:
        >>> import numpy as np
        >>> from splitfg.onnx import OnnxRegressor, example_model
        >>> X = np.random.default_rng(0).standard_normal((200, 4)).astype(np.float32)
        >>> tuned = OnnxRegressor(example_model(), steps=50, random_state=0).fit(X, X[:, 0] * X[:, 1])
        >>> tuned.predict(X[:2]).shape
        (2,)
    """

    def predict(self, X: Any) -> NDArray[np.float32]:
        """Return the value of every row."""
        return self.decision_function(X)[:, 0]

    def _encode(self, y: NDArray[Any]) -> Tensor:
        if y.dtype.kind not in "fiub":
            raise SplitError(["targets are not numbers: use OnnxClassifier, or leave out `--values`"])
        values = y.astype(np.float64)
        mean, std = self.scale_ = float(values.mean()), float(values.std()) or 1.0
        return torch.tensor((values - mean) / std, dtype=torch.float32)[:, None]

    def _loss(self) -> OutputLoss:
        return SquaredError()

    def _outputs(self) -> int:
        return 1

    def _finish_head(self, layer: nn.Linear) -> None:
        mean, std = self.scale_
        with torch.no_grad():
            layer.weight *= std
            layer.bias.mul_(std).add_(mean)

    def _classes(self) -> None:
        return None
