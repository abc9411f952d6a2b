"""Whole models, each awkward in its own way, beside those of ``_awkward``."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

ROWS, WIDTH, CLASSES = 4, 6, 3


class Around(nn.Module):
    """A linear layer, a function of the batch, a linear layer."""

    def __init__(self, function=torch.tanh, width=WIDTH):
        super().__init__()
        self.first, self.head, self.function = nn.Linear(WIDTH, WIDTH), nn.Linear(width, CLASSES), function

    def forward(self, x):
        return self.head(self.function(self.first(x)))


@torch.library.custom_op("splitfg_tests::tripled", mutates_args=())
def tripled(x: torch.Tensor) -> torch.Tensor:
    return 3 * x.sin()


tripled.register_fake(torch.empty_like)
tripled.register_autograd(
    lambda ctx, g: 3 * g * ctx.x.cos(), setup_context=lambda ctx, inputs, output: setattr(ctx, "x", *inputs)
)


def residual_custom_op(x):
    return x + tripled(0.3 * x)


def no_grad_scale(x):
    with torch.no_grad():
        scale = x.norm(dim=-1, keepdim=True)
    return x / scale


def inference_mode_gate(x):
    with torch.inference_mode():
        gate = torch.sigmoid(x)
    return x * gate.clone()


def index_put(x):
    y = torch.zeros_like(x)
    y[:, torch.tensor([2, 0, 1, 5, 4, 3])] = x
    y[:, 0] = x[:, 1] * x[:, 2]
    return y.tanh()


def top_values(x):
    values, _ = x.topk(4, dim=1)
    return torch.cat([values, x.sort(dim=1, descending=True).values[:, 4:]], 1)


def outer_products(x):
    return torch.einsum("bi,bj,ij->bj", x.tanh(), x, torch.eye(x.shape[1], dtype=x.dtype))


def spectrum(x):
    return torch.fft.irfft(torch.fft.rfft(x) * torch.tensor([1.0, 0.5, 2.0, 1.0], dtype=x.dtype), n=x.shape[1])


def complex_numbers(x):
    z = torch.complex(x[:, ::2], x[:, 1::2])
    return torch.cat([(z * z.conj()).real, (z**2).angle().sin()], 1)


def running_sums(x):
    return x.cumsum(1) + x.cummax(1).values + (1 + 0.1 * x.tanh()).cumprod(1)


def sampled(x):
    image = x.reshape(len(x), 1, 2, 3)
    grid = torch.stack([x[:, :4].reshape(-1, 2, 2), x[:, 2:].reshape(-1, 2, 2)], -1).tanh() * 0.7
    return torch.cat([F.grid_sample(image, grid, align_corners=False).flatten(1), x[:, :2]], 1)


def scattered(x):
    index = torch.tensor([[0, 2, 1, 1, 0, 3]]).expand(len(x), -1)
    return torch.zeros_like(x).scatter_add(1, index, x).tanh() + torch.gather(x, 1, index)


def where_and_clamp(x):
    return torch.where(x > 0, x.clamp(max=1.0), 0.1 * x.exp()).masked_fill(x.abs() > 3, 0.0)


def solves(x):
    a = torch.eye(WIDTH, dtype=x.dtype) * 4 + x.T @ x
    return torch.linalg.solve(a, x.T).T


def straight_through(x):
    return x + (x.round() - x).detach()


def views_written_to(x):
    y = x.clone()
    y[:, :3].mul_(2).add_(x[:, 3:])
    y.view(-1)[::2].tanh_()
    return y


def tensor_hook(x):
    if x.requires_grad:
        x.register_hook(lambda g: 2 * g)
    return x.tanh()


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return -g

    @staticmethod
    def jvp(ctx, t):
        return t.clone()


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


class Checkpointed(Around):
    def __init__(self, *, use_reentrant=False):
        super().__init__()
        self.block, self.reentrant = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), use_reentrant

    def forward(self, x):
        z = checkpoint(self.block, self.first(x), use_reentrant=self.reentrant)
        return self.head(z)


class Last(nn.Module):
    """The last state of a recurrent layer."""

    def __init__(self, kind, **settings):
        super().__init__()
        self.layer, self.head = kind(3, 5, batch_first=True, **settings), nn.Linear(5, CLASSES)

    def forward(self, x):
        return self.head(self.layer(x.reshape(len(x), 2, 3))[0][:, -1, :5])


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.GRU(3, 5, batch_first=True), nn.Linear(5, CLASSES)

    def forward(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(x.reshape(len(x), 2, 3), torch.full((len(x),), 2), batch_first=True)
        return self.head(self.layer(packed)[1][-1])


class Encoder(nn.Module):
    """A transformer encoder with a causal mask, a padding mask and norms first."""

    def __init__(self, **settings):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True, dropout=0.0, **settings)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        z = torch.stack([x, x.roll(1, 1), x.tanh()], 1)
        mask = nn.Transformer.generate_square_subsequent_mask(3, dtype=x.dtype)
        padding = torch.zeros(len(x), 3, dtype=x.dtype)
        padding[0, 2] = -torch.inf
        return self.head(self.encoder(z, mask=mask, src_key_padding_mask=padding)[:, -2])


class Bags(nn.Module):
    """Sparse gradients of tables, one with a padding row, one summed in bags."""

    def __init__(self, *, sparse=False):
        super().__init__()
        self.table = nn.Embedding(7, 4, padding_idx=1, sparse=sparse)
        self.bags = nn.EmbeddingBag(7, 4, mode="mean", sparse=sparse)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x):
        ids = (x.abs() * 10).long() % 7
        return self.head((self.table(ids).sum(1) + self.bags(ids)).tanh())


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


class Norms(nn.Module):
    """Batch norm without running statistics, instance norm with them, and a scale by spectral norm."""

    def __init__(self):
        super().__init__()
        self.first = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.batch, self.instance = (
            nn.BatchNorm1d(WIDTH, track_running_stats=False),
            nn.InstanceNorm1d(2, track_running_stats=True),
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        z = self.batch(self.first(x)).reshape(len(x), 2, 3)
        return self.head(self.instance(z).flatten(1))


class DropsTwice(nn.Module):
    """Functional dropout, dropout of features and alpha dropout of one batch."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        z = F.dropout(self.first(x).tanh(), 0.3, self.training)
        z = F.alpha_dropout(self.second(z), 0.2, self.training)
        return self.head(z * torch.bernoulli(torch.full_like(z, 0.7)))


def spectral(train=True):
    return nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), nn.Linear(WIDTH, CLASSES)
    ).train(train)


def old_weight_norm():
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), nn.Linear(WIDTH, CLASSES))


def new_weight_norm():
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), nn.Linear(WIDTH, CLASSES))


def orthogonal():
    return nn.Sequential(parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), nn.Linear(WIDTH, CLASSES))


def scripted():
    return nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())), nn.Linear(WIDTH, CLASSES))


def quantised():
    inner = torch.ao.quantization.quantize_dynamic(
        nn.Sequential(nn.Linear(WIDTH, WIDTH)), {nn.Linear}, dtype=torch.qint8
    )
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), inner, nn.Linear(WIDTH, CLASSES))


def compiled_part():
    inner = torch.compile(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), backend="eager")
    return nn.Sequential(inner, nn.Linear(WIDTH, CLASSES))


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


def derivative_inside(x):
    return torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))[1] + x


def detached_in_place(x):
    y = x.tanh()
    return x + y.detach_()


class ForwardReplaced(Around):
    """A layer with another forward, as some libraries set it on an instance."""

    def __init__(self):
        super().__init__()
        plain = self.first.forward
        self.first.forward = lambda x: 2 * plain(x)


def gradient_inside(x):
    return torch.func.grad(lambda z: (z**3).sum())(x) + x


def energy(x):
    with torch.enable_grad():
        z = x.detach().requires_grad_()
        return x + torch.autograd.grad((z**3).sum(), z)[0]


def compiled_by_method():
    model = Around()
    model.compile(backend="eager")
    return model


def without_values():
    with torch.device("meta"):
        return Around()


def from_inference_mode():
    with torch.inference_mode():
        return Around()


class MaxNorm(Bags):
    """A table that rescales its own rows while it is read."""

    def __init__(self):
        super().__init__()
        self.table.max_norm = 0.5


FUNCTIONS = (
    residual_custom_op,
    no_grad_scale,
    inference_mode_gate,
    index_put,
    top_values,
    outer_products,
    spectrum,
    complex_numbers,
    running_sums,
    sampled,
    scattered,
    where_and_clamp,
    solves,
    straight_through,
    views_written_to,
    tensor_hook,
    Reversal.apply,
    gradient_inside,
    energy,
    derivative_inside,
    detached_in_place,
)
MODELS = {
    **{getattr(f, "__name__", str(f)).replace("apply", "reversal"): partial(Around, f) for f in FUNCTIONS},
    "cached": Cached,
    "cached_detached": CachedDetached,
    "in_place_state": InPlaceState,
    "writes_input": WritesInput,
    "tied_across": TiedAcross,
    "tied_twice": TiedTwice,
    "with_hooks": WithHooks,
    "backward_hook": BackwardHook,
    "parameter_hook": ParameterHook,
    "checkpointed": Checkpointed,
    "checkpointed_reentrant": partial(Checkpointed, use_reentrant=True),
    "lstm": partial(Last, nn.LSTM, num_layers=2),
    "gru_both_ways": partial(Last, nn.GRU, bidirectional=True),
    "rnn_relu": partial(Last, nn.RNN, nonlinearity="relu"),
    "packed": Packed,
    "encoder": Encoder,
    "encoder_norm_first": partial(Encoder, norm_first=True, activation="gelu"),
    "bags": Bags,
    "sparse_bags": partial(Bags, sparse=True),
    "lazy_part": LazyPart,
    "buffer_in_forward": BufferInForward,
    "spectral_norm": partial(spectral, train=False),
    "weight_norm": new_weight_norm,
    "old_weight_norm": old_weight_norm,
    "orthogonal": orthogonal,
    "scripted": scripted,
    "quantised": quantised,
    "compiled_part": compiled_part,
    "compiled_by_method": compiled_by_method,
    "parameters_in_a_list": ParametersInAList,
    "parameter_in_a_closure": ParameterInAClosure,
    "parameters_of_nobody": ParametersOfNobody,
    "two_values": two_values,
    "forward_replaced": ForwardReplaced,
    "without_values": without_values,
    "from_inference_mode": from_inference_mode,
    "max_norm": MaxNorm,
}
TRAINING_MODELS = {
    "norms": Norms,
    "drops_twice": DropsTwice,
    "spectral_norm_training": spectral,
    "weight_dropped": WeightDropped,
}
