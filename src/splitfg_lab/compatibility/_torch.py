"""Models of torch's own layers and of splitfg."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from splitfg import LinearHead, Split
from splitfg.models import GPT, MLP, GPTConfig
from splitfg_lab.compatibility._case import Built, Case

CLASSES, ROWS = 3, 4


def torch_cases() -> list[Case]:
    """Return models of torch's layers."""
    image, rows = partial(torch.randn, ROWS, 3, 8, 8), partial(torch.randn, ROWS, 6)
    sequence = partial(torch.randn, ROWS, 5, 8)
    return [
        Case("torch", "MLP", partial(_built, _mlp, rows)),
        Case("torch", "MLP with dropout, training", partial(_built, partial(_mlp, 0.5), rows), train=True),
        Case("torch", "Conv2d, GroupNorm", partial(_built, partial(_convolutions, _group_norm), image)),
        Case("torch", "Conv2d, BatchNorm2d", partial(_built, partial(_convolutions, nn.BatchNorm2d), image)),
        Case(
            "torch",
            "Conv2d, BatchNorm2d, training",
            partial(_built, partial(_convolutions, nn.BatchNorm2d), image),
            train=True,
        ),
        Case("torch", "TransformerEncoder", partial(_built, _encoder, sequence)),
        Case("torch", "TransformerEncoder, training", partial(_built, _encoder, sequence), train=True),
        Case("torch", "MultiheadAttention", partial(_built, partial(_First, _attention()), sequence)),
        Case("torch", "LSTM", partial(_built, partial(_recurrent, nn.LSTM), sequence)),
        Case("torch", "GRU", partial(_built, partial(_recurrent, nn.GRU), sequence)),
        Case("torch", "Embedding with padding_idx", partial(_built, _table, partial(torch.randint, 0, 7, (ROWS, 5)))),
        Case("splitfg", "MLP", partial(_built, _own_mlp, rows), cut=_cut_own_mlp),
        Case("splitfg", "GPT", _gpt),
    ]


def _built(make: Any, draw: Any) -> Built:
    return make(), (draw(), torch.randint(0, CLASSES, (ROWS,)))


def _mlp(dropout: float = 0.0) -> nn.Module:
    hidden = [nn.Linear(6, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()]
    return nn.Sequential(*hidden, nn.Linear(8, CLASSES))


def _own_mlp() -> nn.Module:
    return nn.Sequential(MLP(6, widths=(8, 8), generator=torch.Generator()), nn.Linear(8, CLASSES))


def _cut_own_mlp(model: nn.Module) -> Split:
    trunk, last = model.children()
    assert isinstance(last, nn.Linear)
    return Split(trunk, LinearHead(last), model=model)


def _group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(2, channels)


def _convolutions(norm: Any) -> nn.Module:
    first = [nn.Conv2d(3, 8, 3, padding=1, bias=False), norm(8), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(8, 8, 3, padding=1, bias=False), norm(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(8, CLASSES))


class _First(nn.Module):
    """Classifies the mean over a sequence of what a layer returns first."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer, self.head = layer(), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        returned = self.layer(x, x, x) if isinstance(self.layer, nn.MultiheadAttention) else self.layer(x)
        z: Tensor = returned[0] if isinstance(returned, tuple) else returned
        outputs: Tensor = self.head(z.mean(1))
        return outputs


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return _First(partial(nn.TransformerEncoder, layer, 2, enable_nested_tensor=False))


def _attention() -> Any:
    return partial(nn.MultiheadAttention, 8, 2, batch_first=True)


def _recurrent(kind: Any) -> nn.Module:
    return _First(partial(kind, 8, 8, num_layers=2, batch_first=True))


def _table() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 4, padding_idx=0), nn.Flatten(), nn.Tanh(), nn.Linear(20, CLASSES))


def _gpt() -> Built:
    model = GPT(GPTConfig(layers=2, width=16, heads=2, context=8, vocab=20), generator=torch.Generator())
    tokens = torch.randint(0, 20, (ROWS, 9))
    return nn.Sequential(model, model.tied_linear()), (tokens[:, :-1], tokens[:, 1:])
