"""The config of a language run: the model, the method, the budget and the corpus."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from splitfg.errors import raise_if
from splitfg.recipes import (
    SGD,
    Adam,
    AdamW,
    MethodRecipe,
    Muon,
)
from splitfg.recipes.checks import adaptive_problems, below, not_positive, rho_problems, warmup_problems
from splitfg_lab.experiments._search import Search, search_problems

EPOCH = 232_588
"""Steps of one epoch: 930,352 windows of 128 tokens, four a step."""

TENTH = 23_258
"""Steps of the screening budget, a tenth of the epoch."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a GPT, and how its linear layers begin; the defaults are the paper's ``small8``.

    The paper does not say how they begin. With ``torch`` its share of the gradient's energy in the trunk comes out,
    which ``gpt2`` misses; the frozen control comes out with either.

    Attributes:
        layers: Transformer blocks.
        width: Width of the residual stream.
        heads: Attention heads.
        context: Tokens per window.
        vocab: Tokens in the vocabulary.
        init: Initialisation of the linear layers: GPT-2's, or torch's default.
    """

    layers: int = 4
    width: int = 256
    heads: int = 4
    context: int = 128
    vocab: int = 50_257
    init: Literal["gpt2", "torch"] = "gpt2"

    def __post_init__(self) -> None:
        found = below(1, self, "layers", "width", "heads", "context", "vocab")
        if not found and self.width % self.heads:
            found.append(f"width {self.width} is not a multiple of heads {self.heads}")
        raise_if(found)


@dataclass(frozen=True)
class UnigramMethod:
    """p(w) = (c(w) + alpha) / (n + alpha V).

    Attributes:
        alpha: Pseudocount that is added to every token.
    """

    alpha: float = 1.0


@dataclass(frozen=True)
class BigramMethod:
    """p(w | v) = λ c(v, w) / c(v) + (1 - λ) p(w), λ chosen on the last hundredth of the training text.

    Attributes:
        alpha: Pseudocount that is added to every token of the unigram part.
    """

    alpha: float = 1.0


@dataclass(frozen=True)
class KnnLMMethod:
    """Nearest-neighbour recall over a frozen random trunk (the paper's Hopfield memory).

    Attributes:
        windows: Training windows that are stored.
        tuning: Training windows after them, on which k, beta and smoothing are chosen.
    """

    windows: int = 4096
    tuning: int = 64

    def __post_init__(self) -> None:
        raise_if(below(1, self, "windows", "tuning"))


@dataclass(frozen=True)
class Language:
    """A GPT on a token stream, as in the paper's appendix unless a field says otherwise.

    Attributes:
        method: Method that trains the trunk, with its settings.
        optimizer: Optimizer, with its settings.
        rho: Trunk step scale.
        steps: Optimizer steps; the schedule is annealed over them.
        warmup: Steps of the linear warmup.
        batch: Windows per step B; step i reads windows Bi to Bi + B - 1.
        max_norm: Clipping bound.
        clip_apart: Clip trunk and head each by itself; the paper clips them jointly.
        adaptive: Let a line search find the trunk's step scale; rho must be 1.
        adaptive_groups: Glob patterns of parameters that the line search scales apart.
        search: How the line search begins.
        model: Sizes of the GPT.
        light: Train only positions, norms and biases of the trunk.
        tied: How the token table serves as lookup: ``exclude`` reads the current table and leaves it out of the
            tangents, ``include`` has it in them, ``fixed`` reads the table as it began, of which the head has a copy.
        block: Logits that exist at once.
        corpus: Training text. ``wikipedia`` is a stand-in of the same length for WikiText-103's training split;
            both are evaluated on WikiText-103's own validation split. ``synthetic`` is random and for tests.
        evaluations: Full passes over the validation split.
        checkpoints: Number of checkpoints in a run.
        matmul: float32 matrix products on a GPU: ``high`` allows TF32.
        step: How a step runs on a GPU: ``compiled`` and captured in a CUDA graph, ``captured`` alone, or ``eager``.
    """

    method: MethodRecipe | KnnLMMethod | UnigramMethod | BigramMethod
    optimizer: Adam | AdamW | SGD | Muon = field(default_factory=lambda: Adam(lr=1.5e-3))
    rho: float = 1.0
    steps: int = EPOCH
    warmup: int = 100
    batch: int = 4
    max_norm: float = 1.0
    clip_apart: bool = False
    adaptive: bool = False
    adaptive_groups: tuple[str, ...] = ()
    search: Search = field(default_factory=Search)
    model: Sizes = field(default_factory=Sizes)
    light: bool = False
    tied: Literal["exclude", "include", "fixed"] = "exclude"
    block: int = 2**24
    corpus: Literal["wikipedia", "wikitext103", "synthetic"] = "wikipedia"
    evaluations: int = 40
    checkpoints: int = 4
    matmul: Literal["high", "highest"] = "high"
    step: Literal["compiled", "captured", "eager"] = "compiled"

    def __post_init__(self) -> None:
        found = below(1, self, "steps", "batch", "block") + not_positive(self, "max_norm") + rho_problems(self.rho)
        found += adaptive_problems(self.adaptive, self.rho) + search_problems(self.search, adaptive=self.adaptive)
        if self.adaptive_groups and not self.adaptive:
            found.append("adaptive_groups are those of a line search: set adaptive=true")
        if isinstance(self.method, MethodRecipe):
            found += warmup_problems(self.warmup, self.steps)
        raise_if(found)
