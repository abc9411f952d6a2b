"""Models of torch's own awkward layers: recurrent, attention, tables, norms, compiled, scripted and checkpointed."""

from functools import partial

import torch
from _awkward_functions import CLASSES, WIDTH, Around
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint


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


class MaxNorm(Bags):
    """A table that rescales its own rows while it is read."""

    def __init__(self):
        super().__init__()
        self.table.max_norm = 0.5


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


def compiled_by_method():
    model = Around()
    model.compile(backend="eager")
    return model


class Checkpointed(Around):
    def __init__(self, *, use_reentrant=False):
        super().__init__()
        self.block, self.reentrant = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), use_reentrant

    def forward(self, x):
        z = checkpoint(self.block, self.first(x), use_reentrant=self.reentrant)
        return self.head(z)


LAYER_MODELS = {
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
    "spectral_norm": partial(spectral, train=False),
    "weight_norm": new_weight_norm,
    "old_weight_norm": old_weight_norm,
    "orthogonal": orthogonal,
    "scripted": scripted,
    "quantised": quantised,
    "compiled_part": compiled_part,
    "compiled_by_method": compiled_by_method,
    "max_norm": MaxNorm,
}
TRAINING_LAYERS = {"norms": Norms, "drops_twice": DropsTwice, "spectral_norm_training": spectral}
