"""Everything of a model, to compare it before and after."""

import torch
from torch import Tensor, nn


def described(value, depth=0):
    """Describe a value so that equal descriptions mean: the same objects, with the same numbers."""
    if isinstance(value, Tensor):
        return id(value), value.requires_grad, value.is_leaf and value.grad is None, numbers(value.detach())
    if isinstance(value, dict) and depth < 6:
        return id(value), [(key, described(inner, depth + 1)) for key, inner in value.items()]
    if isinstance(value, list):
        return id(value), [described(inner, depth + 1) for inner in value]
    return (id(value), repr(value)) if not isinstance(value, nn.Module) else id(value)


def numbers(value):
    if value.is_meta or value.is_quantized:
        return repr(value)
    if value.layout is not torch.strided:
        return value.layout, numbers(value.to_dense())
    return value.dtype, (value.double() if value.dtype is torch.bfloat16 else value).resolve_conj().numpy().tobytes()


def state_of(model):
    return [(name, described(vars(module))) for name, module in model.named_modules()], torch.get_rng_state().tolist()
