"""Residual streams found in a recorded pass, against declared ones and autograd."""

import pytest
import torch
from _toolkit import generator, seeded
from torch import nn

from splitfg import DirectPath, LinearHead, ResidualPath, Split, SplitError, split
from splitfg.models import GPT, GPTConfig


def gpt():
    trunk = GPT(GPTConfig(layers=2, width=8, heads=2, context=6, vocab=11), generator=generator())
    return Split(trunk, LinearHead(trunk.tied_linear()), tied="include")


class Block(nn.Module):
    def __init__(self, width=4, scale=None, act=nn.Identity):
        super().__init__()
        self.norm, self.inner, self.out, self.act = nn.LayerNorm(width), nn.Linear(width, 6), nn.Linear(6, width), act()
        self.scale = scale

    def forward(self, x):
        write = self.act(self.out(self.inner(self.norm(x)).relu()))
        return x + write if self.scale is None else self.scale * x + write


class Stream(nn.Module):
    """Data that is embedded, two blocks, a norm and a read-out."""

    def __init__(self, **settings):
        super().__init__()
        self.first, self.offset = nn.Linear(3, 4), nn.Parameter(torch.randn(4))
        self.blocks = nn.Sequential(Block(**settings), Block(**settings))
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.first(x) + self.offset)))


X, Y = torch.randn(5, 3, generator=generator()), torch.tensor([0, 1, 2, 0, 1])
WRITERS = ("first", "blocks.0.out", "blocks.1.out")


def test_the_stream_of_a_gpt_is_the_declared_one():
    s = gpt()
    tokens = torch.randint(0, 11, (2, 6), generator=generator())
    found, declared = ResidualPath.find(s, tokens), s.trunk.residual_path()
    assert (set(found.writers), found.top) == (set(declared.writers), declared.top)
    assert set(found.added) == set(declared.added)


def test_writers_come_in_order_and_the_last_is_exact():
    model = seeded(Stream)
    path = ResidualPath.find(model, X)
    assert path == ResidualPath(WRITERS, "norm", {"offset": "first"})
    assert str(WRITERS) in repr(path)
    s = split(model)
    grads = DirectPath(path)(s, X, Y).grads
    last = model.blocks[1].out.weight
    (expected,) = torch.autograd.grad(nn.functional.cross_entropy(model(X), Y), last)
    torch.testing.assert_close(grads["blocks.1.out.weight"], expected)


def test_the_message_for_a_deep_model_is_short():
    model = seeded(Stream)
    model.blocks = nn.Sequential(*[Block(act=nn.Tanh) for _ in range(12)])
    with pytest.raises(SplitError, match=r"blocks\.0\.act \(Tanh\).*blocks\.2\.act \(Tanh\).* and 9 more") as raised:
        ResidualPath.find(model, X)
    assert len(str(raised.value)) < 800


def test_a_stream_that_is_scaled():
    model = seeded(lambda: Stream(scale=0.5))
    with pytest.raises(
        SplitError, match=r"sum of blocks\.1\.out, and of values from: blocks\.1 \(Block\): mul.*strict=False"
    ):
        ResidualPath.find(model, X)
    path = ResidualPath.find(model, X, strict=False)
    assert path.writers == WRITERS
    assert not path.strict
    assert "first.weight" in DirectPath(path)(split(model), X, Y).grads


def test_values_that_no_layer_writes():
    with pytest.raises(SplitError, match=r"blocks\.1\.act \(Tanh\)(.|\n)*def layer_gradients\(self, a, delta\)"):
        ResidualPath.find(seeded(lambda: Stream(act=nn.Tanh)), X)


def test_errors_of_paths_show_the_hooks():
    problems = ResidualPath(("blocks.0",), top="blocks").problems(seeded(Stream))
    assert "def layer_gradients(self, a, delta)" in problems[0]
    assert "def pull_back(self, x, u)" in problems[1]


@pytest.mark.parametrize(
    ("name", "top", "first", "last"),
    [
        ("GPT2LMHeadModel", "transformer.ln_f", "transformer.wte", "transformer.h.1.mlp.c_proj"),
        ("LlamaForCausalLM", "model.norm", "model.embed_tokens", "model.layers.1.mlp.down_proj"),
    ],
)
def test_models_of_transformers(name, top, first, last):
    pytest.importorskip("transformers")
    from splitfg_lab.compatibility import CASES

    model, batch = next(case for case in CASES if case.name == name).made()
    path = ResidualPath.find(model, batch)
    assert (path.top, path.writers[0], path.writers[-1]) == (top, first, last)
    s = split(model)
    found = DirectPath(path)(s, *s.unpack(batch)).grads
    model(**batch).loss.backward()
    for parameter in (f"{last}.weight", f"{top}.weight"):
        expected = model.get_parameter(parameter).grad
        assert float((found[parameter] - expected).norm()) <= 1e-5 * float(expected.norm())


class WithoutHead(nn.Module):
    """A trunk alone: its last linear layer writes to the stream, and is no head."""

    def __init__(self):
        super().__init__()
        self.first, self.block, self.norm = nn.Linear(4, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x):
        x = self.first(x)
        return self.norm(x + self.block(x.relu()))


def test_a_trunk_without_its_head_raises_and_a_split_of_it_does_not():
    trunk, x = WithoutHead(), torch.randn(4, 4)
    with pytest.raises(SplitError, match=r"cut at block, do not compute .* build Split\(trunk, head\)"):
        ResidualPath.find(trunk, x)
    path = ResidualPath.find(Split(trunk, LinearHead(nn.Linear(8, 3))), x)
    assert (path.writers, path.top) == (("first", "block"), "norm")


def test_a_chain_has_no_stream():
    chain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    with pytest.raises(SplitError, match=r"no sum of layers' outputs: .* use ParallelPull\(\)"):
        ResidualPath.find(chain, torch.randn(4, 4))


def test_a_mean_after_the_stream_is_cut_off():
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.block, self.norm, self.head = (
                *(nn.Linear(4, 4) for _ in range(2)),
                nn.LayerNorm(4),
                nn.Linear(4, 3),
            )

        def forward(self, x):
            x = self.first(x)
            return self.head(self.norm(x + self.block(x.relu())).mean(1))

    model, x = Pooled(), torch.randn(8, 5, 4)
    with pytest.raises(SplitError, match=r"mean.*cut before it with split\(model, at=\.\.\.\)"):
        ResidualPath.find(model, x)
    assert ResidualPath.find(split(model, at="norm"), x) == ResidualPath(("first", "block"))
