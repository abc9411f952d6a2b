"""Layers that a trunk applies as functions, and torch's attention: sweeps against autograd in float64."""

import pytest
import torch
import torch.nn.functional as F
from _learning import errors, taught
from _toolkit import generator, noise, seeded
from torch import nn

import splitfg
from splitfg import LearnedFeedback, SplitError
from splitfg.feedback import Transposed


def attention(**settings):
    torch.manual_seed(0)
    return nn.MultiheadAttention(8, 2, **settings).double()


class Attends(nn.Module):
    """Attention of one stream to itself or to another, its weights used too."""

    def __init__(self, cross=False, **settings):
        super().__init__()
        self.read = nn.Linear(8, 8).double()
        self.other = nn.Linear(8, settings.get("kdim", 8)).double() if cross else None
        self.attention, self.cross = attention(batch_first=True, **settings), cross

    def forward(self, x):
        q = self.read(x)
        k = self.other(x[:, :3].tanh()) if self.cross else q
        out, weights = self.attention(q, k, k, average_attn_weights=not self.cross, **self.masks(x, k))
        return (out * weights.square().sum(-1).reshape(len(x), x.shape[1], -1).sum(-1, keepdim=True)).mean(1)

    def masks(self, x, k):
        padding = torch.zeros(len(x), k.shape[1], dtype=torch.bool)
        padding[0, -1] = True
        later = noise(x.shape[1], k.shape[1], seed=5) > 0
        later[:, 0] = False  # every query attends to something
        return {"key_padding_mask": padding, "attn_mask": later}


class Encoder(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, **settings)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()

    def forward(self, x):
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.encoder(x, mask=causal, is_causal=True).mean(1)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.memory, self.decoder = nn.Linear(8, 8).double(), nn.TransformerDecoder(layer, 2).double()

    def forward(self, x):
        return self.decoder(x, self.memory(x[:, :3])).mean(1)


class Functional(nn.Module):
    """``F.linear`` with a bias of its own, without one, and with one that is computed."""

    def __init__(self):
        super().__init__()
        weights = [noise(8, 8, seed=i) / 3 for i in range(3)]
        self.weights = nn.ParameterList([nn.Parameter(w) for w in weights])
        self.bias, self.part = nn.Parameter(noise(8, seed=4)), nn.Parameter(noise(4, seed=5))

    def forward(self, x):
        x = torch.tanh(F.linear(x, self.weights[0], self.bias))
        x = torch.tanh(F.linear(input=x, weight=self.weights[1]))
        return F.linear(x, self.weights[2], torch.cat([self.part, torch.zeros_like(self.part)])).mean(1)


class Recurrent(nn.Module):
    """A recurrent layer from a state that is computed, whose outputs and last states all act on h."""

    def __init__(self, kind, **settings):
        super().__init__()
        torch.manual_seed(0)
        self.read, self.layer = nn.Linear(8, 8).double(), kind(8, 8, **settings).double()
        self.begin = nn.Linear(8, 8).double()

    def forward(self, x):
        ways, batch_first = self.layer.num_layers * (1 + self.layer.bidirectional), self.layer.batch_first
        state = self.begin(x[:, 0]).expand(ways, -1, -1)
        given = (state, state.tanh()) if isinstance(self.layer, nn.LSTM) else state
        steps = self.read(x) if batch_first else self.read(x).transpose(0, 1)
        outputs, last = self.layer(steps, given)
        last = sum(last) if isinstance(last, tuple) else last
        return outputs.sum(1 if batch_first else 0).unflatten(-1, (-1, 8)).mean(1) + last.mean(0)


class Cell(nn.Module):
    def __init__(self, kind, **settings):
        super().__init__()
        torch.manual_seed(0)
        self.read, self.cell = nn.Linear(8, 8).double(), kind(8, 8, **settings).double()

    def forward(self, x):
        state = None
        for step in self.read(x).unbind(1):
            state = self.cell(step, state)
        return sum(state) if isinstance(state, tuple) else state


def frozen(trunk, *parts):
    for part in parts:
        trunk.get_parameter(part).requires_grad_(False)
    return trunk


TRUNKS = {
    "self-attention": Attends,
    "cross-attention": lambda: Attends(cross=True),
    "attention without biases": lambda: Attends(bias=False),
    "other widths": lambda: Attends(cross=True, kdim=6, vdim=6),
    "encoder, norms first": lambda: Encoder(norm_first=True),
    "encoder, norms last": lambda: Encoder(activation="gelu"),
    "decoder": Decoder,
    "gru": lambda: Recurrent(nn.GRU),
    "gru both ways": lambda: Recurrent(nn.GRU, num_layers=2, bidirectional=True, batch_first=True),
    "lstm": lambda: Recurrent(nn.LSTM, num_layers=2, batch_first=True),
    "lstm without biases": lambda: Recurrent(nn.LSTM, bias=False, bidirectional=True),
    "rnn": lambda: Recurrent(nn.RNN),
    "rnn of relus": lambda: Recurrent(nn.RNN, nonlinearity="relu", num_layers=2),
    "gru cell": lambda: Cell(nn.GRUCell),
    "lstm cell": lambda: Cell(nn.LSTMCell, bias=False),
    "rnn cell": lambda: Cell(nn.RNNCell, nonlinearity="relu"),
    "a frozen recurrence": lambda: frozen(Recurrent(nn.GRU), "layer.weight_hh_l0", "layer.bias_hh_l0"),
    "functions": Functional,
    "a frozen function": lambda: frozen(Functional(), "weights.1"),
    "a frozen weight": lambda: frozen(Functional(), "weights.0"),
    "a frozen bias": lambda: frozen(Functional(), "bias"),
    "a frozen projection": lambda: frozen(Attends(cross=True), "attention.in_proj_weight", "attention.in_proj_bias"),
}


@pytest.mark.parametrize("name", TRUNKS)
def test_a_sweep_by_the_exact_route_is_backpropagation(name):
    trunk = TRUNKS[name]()
    split = splitfg.Split(trunk, splitfg.LinearHead(nn.Linear(8, 3).double()))
    x, y = noise(4, 5, 8), torch.arange(4) % 3
    expected = splitfg.Backprop()(split, x, y).grads
    feedback = LearnedFeedback(Transposed())
    with torch.no_grad():
        tape = feedback.record(split, x)
        torch.testing.assert_close(tape.h, trunk(x))
        grads = feedback.sweep(split, tape, split.head(tape.h, y).u).grads
    assert set(grads) == {n for n, p in trunk.named_parameters() if p.requires_grad}
    for n, g in grads.items():
        torch.testing.assert_close(g, expected[f"trunk.{n}"], msg=n)


def test_a_recurrent_layer_learns_its_maps():
    torch.manual_seed(0)
    split = splitfg.Split(Recurrent(nn.LSTM, batch_first=True), splitfg.LinearHead(nn.Linear(8, 3).double()))
    x, y = noise(32, 5, 8), torch.arange(32) % 3
    found = errors(split, taught(LearnedFeedback(), split, x, y, 40), x, y)
    assert max(found.values()) < 1e-4, found


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (nn.LSTM(8, 8, proj_size=4, batch_first=True), "proj_size"),
        (nn.GRU(8, 4, batch_first=True), "packed sequences; pad them"),
    ],
    ids=["projection", "packed"],
)
def test_recurrent_layers_without_a_closed_form_raise(layer, words):
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            if isinstance(layer, nn.LSTM):
                return self.layer(x)[0][:, -1]
            packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 4, 4, 2]), batch_first=True)
            return self.layer(packed)[1][-1]

    split = splitfg.Split(Last().double(), splitfg.LinearHead(nn.Linear(4, 3).double()))
    with pytest.raises(SplitError, match=f"the layer has no closed form for {words}"):
        LearnedFeedback()(split, noise(4, 5, 8), torch.arange(4) % 3, generator=generator())


class DotProduct(nn.Module):
    """F.scaled_dot_product_attention with its masks; in training mode with dropout."""

    def __init__(self, heads=4, **settings):
        super().__init__()
        self.heads, self.settings = heads, settings
        self.query, self.rest = nn.Linear(8, 8).double(), nn.Linear(8, 4 * heads).double()

    def forward(self, x):
        q = self.query(x).unflatten(-1, (4, 2)).transpose(1, 2)
        k, v = (t.unflatten(-1, (self.heads, 2)).transpose(1, 2) for t in self.rest(x).chunk(2, -1))
        p = 0.4 if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=p, **self.settings).transpose(1, 2).flatten(2).mean(1)


def _masks():
    """A mask in which one position attends to nothing, as padding does, and one with numbers to add."""
    allowed = noise(5, 5, seed=5) > -0.5
    allowed[2] = False
    return {"allowed": allowed, "added": noise(5, 5, seed=6)}


DOT_PRODUCTS = {
    "plain": DotProduct,
    "causal": lambda: DotProduct(is_causal=True, scale=0.3),
    "allowed": lambda: DotProduct(attn_mask=_masks()["allowed"]),
    "added": lambda: DotProduct(attn_mask=_masks()["added"]),
    "groups": lambda: DotProduct(heads=2, enable_gqa=True, is_causal=True),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", DOT_PRODUCTS)
def test_attention_with_masks_and_dropout(name, training):
    trunk = seeded(DOT_PRODUCTS[name]).double().train(training)
    split = splitfg.Split(trunk, splitfg.LinearHead(nn.Linear(8, 3).double()))
    x, y = noise(4, 5, 8), torch.arange(4) % 3
    split = split.for_step(x, generator())  # all passes draw the same mask
    expected = splitfg.Backprop()(split, x, y, generator=generator()).grads
    feedback = LearnedFeedback(Transposed())
    with torch.no_grad():
        tape = feedback.record(split, x)
        grads = feedback.sweep(split, tape, split.head(tape.h, y).u).grads
    for n, g in grads.items():
        torch.testing.assert_close(g, expected[f"trunk.{n}"], msg=n)


def test_gradients_that_are_not_finite_raise():
    """The derivative of the square root at 0; the loss is finite."""

    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.read = nn.Linear(8, 8).double()

        def forward(self, x):
            return self.read(x).relu().sqrt()

    x, y = noise(4, 8), torch.arange(4) % 3
    for check, words in ((True, "read.weight.*not finite: .*sqrt at 0"), (False, "a gradient .* is not finite")):
        split = splitfg.Split(Root(), splitfg.LinearHead(nn.Linear(8, 3).double()), check=check)
        with pytest.raises(SplitError, match=words):
            LearnedFeedback()(split, x, y, generator=generator())


class Named(nn.Module):
    """Reductions with NumPy's names of arguments, and a lookup by a function, with a padding row."""

    def __init__(self):
        super().__init__()
        self.table, self.read = nn.Parameter(noise(6, 8)), nn.Linear(8, 8).double()

    def forward(self, tokens):
        z = self.read(F.embedding(tokens, self.table, padding_idx=2))
        return (z - z.mean(axis=-1, keepdims=True)).sum(axis=1)


def test_names_of_numpy_and_lookups_by_functions():
    split = splitfg.Split(Named(), splitfg.LinearHead(nn.Linear(8, 3).double()))
    x, y = torch.arange(20).view(4, 5) % 6, torch.arange(4) % 3
    assert max(errors(split, taught(LearnedFeedback(), split, x, y, 60), x, y).values()) < 1e-6


def test_maps_learn_the_encoder():
    split = splitfg.Split(Encoder(norm_first=True), splitfg.LinearHead(nn.Linear(8, 3).double()))
    x, y = noise(8, 5, 8), torch.arange(8) % 3
    estimate = taught(LearnedFeedback(), split, x, y, 60)
    assert estimate.stats.trunk_backward == 0
    assert max(errors(split, estimate, x, y).values()) < 1e-6


def test_compiled_steps_follow_functional_layers():
    split = splitfg.Split(Encoder(norm_first=True), splitfg.LinearHead(nn.Linear(8, 3).double()))
    x, y = noise(8, 5, 8), torch.arange(8) % 3
    fast_split, fast = splitfg.estimators.compiled(split, LearnedFeedback(), lambda function: function)
    found, expected = (
        e(s, x, y, generator=generator()).grads for s, e in ((fast_split, fast), (split, LearnedFeedback()))
    )
    for n, g in expected.items():
        torch.testing.assert_close(found[n], g, msg=n)


def test_maps_learn_to_pass_frozen_attention():
    trunk = frozen(Attends(), "attention.in_proj_weight", "attention.out_proj.weight")
    split = splitfg.Split(trunk, splitfg.LinearHead(nn.Linear(8, 3).double()))
    x, y = noise(8, 5, 8), torch.arange(8) % 3
    assert max(errors(split, taught(LearnedFeedback(), split, x, y, 60), x, y).values()) < 1e-6


class Applies(nn.Module):
    """A function of a linear layer and of one more parameter."""

    def __init__(self, function):
        super().__init__()
        self.read, self.vector, self.function = nn.Linear(8, 8).double(), nn.Parameter(noise(8)), function

    def forward(self, x):
        return (self.function(self.read(x), self.vector) * self.vector).mean(1)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda z, w: F.linear(z, w).unsqueeze(-1), "linear multiplies by a parameter outside a layer"),
        (lambda z, _: F.softmax(z, _stacklevel=5), "softmax has no closed form for a dimension that torch chooses"),
        (lambda z, _: F.log_softmax(z, _stacklevel=5), "log_softmax has no closed form for a dimension that torch"),
    ],
)
@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
def test_functions_without_a_closed_form_raise_an_error(function, words):
    split = splitfg.Split(Applies(function), splitfg.LinearHead(nn.Linear(8, 3).double()), check=False)
    with pytest.raises(SplitError, match=words):
        LearnedFeedback()(split, noise(4, 5, 8), torch.arange(4) % 3, generator=generator())


@pytest.mark.parametrize("settings", [{"add_bias_kv": True}, {"add_zero_attn": True}])
def test_settings_without_a_closed_form_raise_an_error(settings):
    split = splitfg.Split(Attends(**settings), splitfg.LinearHead(nn.Linear(8, 3).double()))
    with pytest.raises(
        SplitError, match=r"attention \(MultiheadAttention\): attention has no closed form for .*SplitFG"
    ):
        LearnedFeedback()(split, noise(4, 5, 8), torch.arange(4) % 3, generator=generator())
