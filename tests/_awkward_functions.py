"""Models with an awkward function of the batch between two linear layers."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

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


def gradient_inside(x):
    return torch.func.grad(lambda z: (z**3).sum())(x) + x


def energy(x):
    with torch.enable_grad():
        z = x.detach().requires_grad_()
        return x + torch.autograd.grad((z**3).sum(), z)[0]


def derivative_inside(x):
    return torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))[1] + x


def detached_in_place(x):
    y = x.tanh()
    return x + y.detach_()


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
FUNCTION_MODELS = {getattr(f, "__name__", str(f)).replace("apply", "reversal"): partial(Around, f) for f in FUNCTIONS}
