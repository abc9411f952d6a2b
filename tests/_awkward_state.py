"""Models that keep state, hold or share parameters in unusual ways, or have hooks."""

import torch
from _awkward_functions import CLASSES, WIDTH, Around
from torch import nn
from torch.nn import functional as F


class Cached(Around):
    """Reuses a result of the first pass, which depends on the parameters."""

    def __init__(self):
        super().__init__()
        self.cache = {}

    def forward(self, x):
        if "scale" not in self.cache:
            self.cache["scale"] = self.first.weight.norm()
        return self.head(self.first(x).tanh() * self.cache["scale"])


class CachedDetached(Around):
    """Stores a detached result of every pass, and reads that of the last one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.ones(WIDTH), persistent=False)

    def forward(self, x):
        z = self.first(x).tanh() * self.last
        self.last = z.detach().mean(0)
        return self.head(z)


class InPlaceState(Around):
    """Adds to a buffer in place before it reads it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps += 1
        return self.head((self.first(x) / self.steps).tanh())


class WritesInput(Around):
    def forward(self, x):
        x.mul_(0.5)
        return self.head(self.first(x).tanh())


class TiedAcross(nn.Module):
    """A layer shares the head's weight, and the model reads it once more from the head."""

    def __init__(self):
        super().__init__()
        self.second, self.head = nn.Linear(WIDTH, CLASSES, bias=False), nn.Linear(WIDTH, CLASSES, bias=False)
        self.second.weight = self.head.weight

    def forward(self, x):
        return self.head((self.second(x).tanh() @ self.head.weight).tanh())


class TiedTwice(nn.Module):
    """A layer of the trunk shares the head's weight, and the trunk also uses it transposed."""

    def __init__(self):
        super().__init__()
        self.second, self.head = nn.Linear(WIDTH, CLASSES, bias=False), nn.Linear(WIDTH, CLASSES, bias=False)
        self.second.weight = self.head.weight

    def forward(self, x):
        return self.head((self.second(x).tanh() @ self.second.weight).tanh())


class WithHooks(Around):
    """A hook scales a layer's output, another changes its input."""

    def __init__(self):
        super().__init__()
        self.first.register_forward_hook(lambda module, args, z: 1.5 * z)
        self.first.register_forward_pre_hook(lambda module, args: (args[0] + 1,))


class BackwardHook(Around):
    """A hook that scales the gradient in the backward pass."""

    def __init__(self):
        super().__init__()
        self.first.register_full_backward_hook(
            lambda module, grads, given: tuple(3 * g if g is not None else None for g in grads)
        )
        self.before = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return super().forward(self.before(x))


class ParameterHook(Around):
    def __init__(self):
        super().__init__()
        self.first.weight.register_hook(lambda g: 0.5 * g)


class NestedInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.head = nn.Linear(2, 4), nn.Linear(4, 4), nn.Linear(4, CLASSES)

    def forward(self, parts):
        return self.head((self.left(parts["a"]["x"]) + self.right(parts["b"][0])).tanh())


class LazyPart(nn.Module):
    """Makes a layer in its first pass."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.scale = None

    def forward(self, x):
        if self.scale is None:
            self.scale = nn.Parameter(torch.full((WIDTH,), 0.7, dtype=x.dtype))
        return self.head(self.first(x).tanh() * self.scale)


class BufferInForward(Around):
    def forward(self, x):
        self.register_buffer("seen", self.first(x).mean(0).detach())
        return self.head((self.first(x) - self.seen).tanh())


class ParametersInAList(nn.Module):
    """Reads a layer's parameters from a list that its constructor filled."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.held = [self.first.weight, self.first.bias]

    def forward(self, x):
        return self.head(F.linear(x, *self.held).tanh())


class ParameterInAClosure(Around):
    def __init__(self):
        scale = nn.Parameter(torch.rand(WIDTH))
        super().__init__(lambda z: (z * scale).tanh())
        self.scale = scale


class ParametersOfNobody(Around):
    """Uses a layer that no module registers: neither an optimizer nor an estimate trains it."""

    def __init__(self):
        super().__init__()
        self.hidden = (nn.Linear(WIDTH, WIDTH),)

    def forward(self, x):
        return self.head(self.hidden[0](self.first(x)).tanh())


class WeightDropped(Around):
    """Drops weights, so that no layer of the trunk is called."""

    def forward(self, x):
        return self.head(F.linear(x, F.dropout(self.first.weight, 0.5, self.training), self.first.bias))


class TwoValues(nn.Module):
    """Passes two values on."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.layer(x), x


class TakesTwo(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, CLASSES)

    def forward(self, values):
        return self.layer(values[0].tanh() + values[1])


def two_values():
    return nn.Sequential(TwoValues(), TakesTwo())


class ForwardReplaced(Around):
    """A layer with another forward, as some libraries set it on an instance."""

    def __init__(self):
        super().__init__()
        plain = self.first.forward
        self.first.forward = lambda x: 2 * plain(x)


def without_values():
    with torch.device("meta"):
        return Around()


def from_inference_mode():
    with torch.inference_mode():
        return Around()


STATE_MODELS = {
    "cached": Cached,
    "cached_detached": CachedDetached,
    "in_place_state": InPlaceState,
    "writes_input": WritesInput,
    "tied_across": TiedAcross,
    "tied_twice": TiedTwice,
    "with_hooks": WithHooks,
    "backward_hook": BackwardHook,
    "parameter_hook": ParameterHook,
    "lazy_part": LazyPart,
    "buffer_in_forward": BufferInForward,
    "parameters_in_a_list": ParametersInAList,
    "parameter_in_a_closure": ParameterInAClosure,
    "parameters_of_nobody": ParametersOfNobody,
    "two_values": two_values,
    "forward_replaced": ForwardReplaced,
    "without_values": without_values,
    "from_inference_mode": from_inference_mode,
}
TRAINING_STATE = {"weight_dropped": WeightDropped}
