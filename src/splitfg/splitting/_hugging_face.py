"""Models of Hugging Face's transformers, with or without adapters of peft; recognised without importing either."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from splitfg.errors import SplitError
from splitfg.splitting._cut import linears
from splitfg.splitting._interface import LABELS, Interface, without_labels
from splitfg.types import Target

IGNORED = -100
"""Label of positions without a target."""

_NEXT_TOKEN_LOSSES = ("ForCausalLM", "ForConditionalGeneration")
_UNSHIFTED = ("XLNetLMHeadModel", "XLMWithLMHeadModel", "FlaubertWithLMHeadModel")
_OTHER_LOSSES = ("regression", "multi_label_classification")


def is_hugging_face(model: nn.Module) -> bool:
    """Whether a model is a ``PreTrainedModel`` of transformers, or one that peft has wrapped."""
    return _is_pretrained(base_model(model))


def base_model(model: nn.Module) -> nn.Module:
    """Return the model inside a ``PeftModel``; other models are returned unchanged."""
    wrapped = hasattr(model, "peft_config") and callable(getattr(model, "get_base_model", None))
    inner: nn.Module = model.get_base_model() if wrapped else model  # type: ignore[operator]
    return inner


def interface_of(model: nn.Module) -> Interface:
    """Return how a model takes a batch: no cache of keys and values, logits from its ``ModelOutput``."""
    base = base_model(model)
    return Interface(
        output=partial(_logits, kind=type(base).__name__),
        constants={"use_cache": False} if _may_cache(base) else {},
        unpack=partial(_unpacked, base, virtual=_virtual_tokens(model)),
    )


def _virtual_tokens(model: nn.Module) -> int:
    """Return the number of positions that prompts of peft add in front of a sequence; prefixes add none."""
    config: Any = getattr(model, "active_peft_config", None)
    if not getattr(config, "is_prompt_learning", False) or "PREFIX" in str(config.peft_type):
        return 0
    return int(config.num_virtual_tokens)


def _may_cache(model: nn.Module) -> bool:
    """Whether forward takes ``use_cache``, by name or among further keywords of a model that caches by default."""
    taken = inspect.signature(model.forward).parameters
    config: Any = model.config
    decoder = config.get_text_config() if hasattr(config, "get_text_config") else config
    further = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    return "use_cache" in taken or (further and bool(getattr(decoder, "use_cache", False)))


def classifier_name(model: nn.Module) -> str | None:
    """Return the model's name of the last linear layer outside its base model; ``None`` if there is none."""
    base = base_model(model)
    inner: Any = getattr(base, "base_model", base)
    inside = set() if inner is base else set(inner.modules())
    outside = set(base.modules()) - inside  # without the modules that peft adds
    names = [name for name, layer in linears(model).items() if layer in outside]
    return names[-1] if names and inside else None


def readout_name(model: nn.Module) -> str | None:
    """Return the model's name of its output embeddings; ``None`` if it has none, such as a classifier."""
    layer = base_model(model).get_output_embeddings()  # type: ignore[operator]
    return next((name for name, module in model.named_modules() if module is layer), None) if layer else None


def substitutes(model: nn.Module) -> dict[str, nn.Module]:
    """Return modules with a forward-mode rule that compute the same as some without one, by the name of the latter.

    Bloom's GELU is a ``torch.autograd.Function`` without ``jvp``; outputs and gradients are those of the tanh form.
    """
    found = {name: module for name, module in model.named_modules() if type(module).__name__ == "BloomGelu"}
    x = torch.linspace(-3, 3, 13)
    expected = _value_and_slope(nn.GELU("tanh"), x)
    return {n: nn.GELU("tanh") for n, m in found.items() if _all_close(_value_and_slope(m, x), expected)}


def _value_and_slope(function: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        x = x.clone().requires_grad_()
        z = function(x)
        return z.detach(), torch.autograd.grad(z.sum(), x)[0]


def _all_close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(found, expected, strict=True))


def model_problems(model: nn.Module, *, default_loss: bool, default_cut: bool) -> list[str]:
    """List settings of a model that a split cannot follow.

    Args:
        model: The model.
        default_loss: Whether the split uses cross-entropy because no loss was given.
        default_cut: Whether the split looks for the output layer because none was named.
    """
    found, base = [], base_model(model)
    headless = getattr(base, "base_model", None) is base and "For" not in type(base).__name__
    if default_cut and headless and readout_name(model) is None:
        found.append(
            f"{type(base).__name__} has no head: use a class with one, such as one that ends in ForCausalLM or"
            " ForSequenceClassification, or build Split(trunk, head)"
        )
    config: Any = base.config
    if getattr(base, "is_gradient_checkpointing", False):
        found.append(
            "the model recomputes activations for a backward pass, which estimates do not have: call"
            " model.gradient_checkpointing_disable()"
        )
    kind, classifies = getattr(config, "problem_type", None), "Classification" in type(base).__name__
    single = classifies and getattr(config, "num_labels", None) == 1
    if default_loss and (kind in _OTHER_LOSSES or single):
        found.append(
            f"the model's own loss is that of {kind or 'regression'}: pass loss=SquaredError() for regression (half the"
            " mean squared error of transformers), or loss=CrossEntropy()"
        )
    return found


def _is_pretrained(model: nn.Module) -> bool:
    config = getattr(model, "config", None)
    known = hasattr(config, "model_type") and hasattr(model, "main_input_name")
    return known and callable(getattr(model, "get_output_embeddings", None))


def _logits(returned: Any, kind: str) -> Tensor:
    """Return the logits of a ``ModelOutput``, or the first entry of a tuple."""
    if isinstance(returned, tuple):
        first: Tensor = returned[0]
        return first
    logits: Tensor | None = getattr(returned, "logits", None)
    if logits is None:
        raise SplitError(
            [
                f"{kind} returns a {type(returned).__name__} without logits: name its outputs with"
                " split(model, output=lambda returned: ...)"
            ]
        )
    return logits


def _unpacked(model: nn.Module, batch: Mapping[str, Any], *, virtual: int = 0) -> tuple[dict[str, Any], Target]:
    """Return inputs and target of a batch with labels, as the model's own loss uses them.

    Args:
        model: The model, without adapters.
        batch: The batch.
        virtual: Positions without labels in front of every sequence.
    """
    inputs, labels = without_labels(batch)
    if getattr(model.config, "is_encoder_decoder", False):
        taken = "decoder_input_ids" in inspect.signature(model.forward).parameters
        generates = taken and "Classification" not in type(model).__name__  # classifiers read the inputs twice
        if generates and not any(name in inputs for name in ("decoder_input_ids", "decoder_inputs_embeds")):
            inputs["decoder_input_ids"] = _shifted_right(model, labels)
        return inputs, labels
    if virtual and labels.ndim > 1:
        labels = torch.cat([labels.new_full((*labels.shape[:-1], virtual), IGNORED), labels], dim=-1)
    return inputs, _next_tokens(labels) if _predicts_next(model) else labels


def _predicts_next(model: nn.Module) -> bool:
    kind, name = getattr(model, "loss_type", None), type(model).__name__
    named = name.endswith(("LMHeadModel", "DoubleHeadsModel")) and name not in _UNSHIFTED
    return kind in _NEXT_TOKEN_LOSSES or (kind is None and named)


def _next_tokens(labels: Tensor) -> Tensor:
    """Return the target of every position: the label of the next one, and none at the last."""
    end = labels.new_full((*labels.shape[:-1], 1), IGNORED)
    return torch.cat([labels[..., 1:], end], dim=-1)


def _shifted_right(model: nn.Module, labels: Tensor) -> Tensor:
    """Return the decoder's inputs: a start token, then the labels without the last, padded where ignored."""
    own = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if own is not None:
        made: Tensor = own(labels=labels)
        return made
    config: Any = model.config
    start, padding = (getattr(config, name, None) for name in ("decoder_start_token_id", "pad_token_id"))
    if start is None or padding is None:
        raise SplitError(
            [
                f"config.decoder_start_token_id is {start} and config.pad_token_id is {padding}, so that the decoder's"
                f" inputs cannot be made from {LABELS}: set both, or pass decoder_input_ids in the batch"
            ]
        )
    shifted = torch.cat([labels.new_full((labels.shape[0], 1), start), labels[:, :-1]], dim=1)
    return shifted.masked_fill(shifted == IGNORED, padding)
