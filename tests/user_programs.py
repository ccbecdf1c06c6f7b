"""Random user programs: a module and what a script does with it, made from a grammar, run as they are and with
ORTModule around the module.

    python tests/user_programs.py FIRST LAST [--without feature,...] [--only feature,...] [--keep-going] [--show]

A program is source text: statements of a forward over (rows, 4) tensors `h` and `g`, lines of its constructor, and
steps of a script. Every statement stands for itself, so a failing program is made smaller by leaving statements out.
The text is executed in a namespace of its own for each side, so globals, logs and hooks are two sets. Both sides write
down what they see (results, gradients with None, buffers, logs, types of errors) and the two lists must be equal:
numbers within 1e-9 in fp64.

A feature names a group of productions (see GRAMMAR); `base` is always there.
"""

from __future__ import annotations

import argparse
import copy
import linecache
import random
import sys
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

TOLERANCE = 1e-9

# feature -> statements of forward. One line each, or several with \n; what a production needs in the constructor stands
# after "||".
GRAMMAR: dict[str, list[str]] = {
    "base": [
        "h = torch.tanh(self.first(h))",
        "h = self.second(h) * 0.5 + g",
        "g = torch.sigmoid(self.first(g))",
        "h = F.gelu(h @ self.matrix)",
        "h = h + self.bias * g",
        "g, h = h, g",
        "h = F.softmax(h, -1) * 3",
        "h = F.layer_norm(h, (4,), self.bias)",
        "h = h - h.mean(0, keepdim=True)",
        "h = torch.cat([h, g], 1)[:, 1:5]",
        "a, b = h.chunk(2, -1)\nh = torch.cat([b, a * 2], -1)",
        "h = torch.where(g > 0, h, -h)",
        "h = h.clamp(-1, 1) + h.abs().sum(-1, keepdim=True) * 0.1",
        "h = h @ (g.t() @ g).tanh()",
        "h = h.flip(-1) * h.roll(1, -1)",
        "h = h.unsqueeze(1).expand(-1, 3, -1).sum(1)",
        "h = torch.stack([h, g]).amax(0)",
        "h = h.reshape(-1, 2).cumsum(0).reshape(h.shape)",
        "h = F.leaky_relu(self.second(h), 0.2)",
        "h = h * torch.arange(4, dtype=h.dtype)",
        "h = torch.einsum('bi,ij->bj', h, self.matrix)",
        "h = h / (1 + h.norm(dim=-1, keepdim=True))",
        "h = h[:, [2, 0, 1, 3]]",
        "h = torch.outer(h[:, 0], self.bias) + h",
        "h = self.tied(h)||self.tied = nn.Linear(4, 4)\nself.tied.weight = self.first.weight",
        "h = self.many[1](self.many[0](h))||self.many = nn.ModuleList([nn.Linear(4, 4), nn.Tanh()])",
        "for p in self.list:\n    h = h * p||self.list = nn.ParameterList([torch.ones(4) * 0.7, torch.ones(4) * 1.2])",
    ],
    "nograd": [
        "with torch.no_grad():\n    g = torch.tanh(self.second(h))",
        "h = h * g.detach()",
        "h = h + (h.round() - h).detach()",
        "with torch.no_grad():\n    self.frozen.mul_(0.9)||self.register_buffer('frozen', torch.ones(4))",
        "with torch.no_grad():\n    with torch.enable_grad():\n        h = h * self.bias",
        "with torch.set_grad_enabled(self.training):\n    h = h * self.bias",
        "with torch.inference_mode():\n    g = torch.tanh(h)\ng = g.clone()",
    ],
    "inplace": [
        "g = h * 1\ng[:, 0] = 2.0\nh = h + g",
        "g = h.clone()\ng.mul_(2).add_(1)",
        "g = h * 1\ng[1:] += h[:1]",
        "g = h + 0\ng.view(-1)[::3] = 0\nh = g * 2",
        "g = g * 1\ng.t()[1].add_(self.bias[0])",
        "h = h * 1\nh.mul_(0.5)\nh += self.bias",
        "h = F.relu(h + 1, inplace=True)",
        "g = torch.zeros_like(h)\ng[:, 1:3] = h[:, :2]\nh = g + h",
        "h = h * 1\nfor i in range(h.shape[1]):\n    h[:, i] *= i + 1",
        "h = self.drop(h * 1)||self.drop = nn.Dropout(0.0, inplace=True)",
        "g = h * 1\ng.masked_fill_(g > 0, 0.5)\nh = h + g",
        "a, b = (h * 1).split(2, -1)\nb += a\nh = torch.cat([b, a], -1)",
        "x = x * 1\nx.mul_(2)\nh = h + x",
    ],
    "buffers": [
        "self.count += 1\nh = h * self.count||self.register_buffer('count', torch.tensor(0))",
        "self.steps = self.steps + 1||self.register_buffer('steps', torch.tensor(0))",
        "self.mean.mul_(0.9).add_(0.1 * h.detach().mean(0))\nh = h - self.mean||self.register_buffer('mean', "
        "torch.zeros(4))",
        "self.last = h.detach().sum(0)\nh = h + 0.1 * self.last||self.register_buffer('last', torch.zeros(4), "
        "persistent=False)",
        "h = self.norm(h)||self.norm = nn.BatchNorm1d(4)",
        "h = h + self.queue.sum(0)\nself.queue = torch.roll(self.queue, 1, 0)\nself.queue[0] = h.detach().sum(0)"
        "||self.register_buffer('queue', torch.zeros(3, 4))",
        "self.plain.add_(1)\nh = h * self.plain||self.plain = torch.ones(4)",
        "h = h * self.table[1]||self.register_buffer('table', torch.linspace(0, 1, 4))",
        "self.one, self.other = self.other, self.one\nh = h * self.one"
        "||self.register_buffer('one', torch.ones(4))\nself.register_buffer('other', torch.full((4,), 2.0))",
    ],
    "control": [
        "if self.training:\n    h = h * 1.5",
        "if x.shape[0] > 2:\n    h = h[:2].sum(0, keepdim=True) + h",
        "h = h / x.shape[0] if x.shape[0] else h",
        "if self.mode == 'a':\n    h = h + 1\nelse:\n    h = self.second(h)",
        "for i in range(self.depth):\n    h = torch.tanh(self.first(h)) + i",
        "h = h * self.scale",
        "if x.shape[0] > 2:\n    h = h * self.scale",
        "if scale != 1.0:\n    h = h * self.scale",
        "h = h * self.factors[-1]",
        "h = h * self.config.alpha",
        "if flag:\n    h = -h",
        "h = h * scale",
        "if y is not None:\n    h = h + y",
        "assert x.shape[0] != 7, 'seven rows'",
        "if x.shape[0] == 5 and flag:\n    raise KeyError('five')",
    ],
    "data": [
        "if h.sum() > 0.1:\n    h = h * 2\nelse:\n    h = self.second(h)",
        "if h.sum() > 0.1:\n    h = h * self.scale",
        "h = h * (2.0 if h.detach().max().item() > 1 else 0.5)",
        "h = h + h[h > 0].sum()",
        "h = h.index_add(0, torch.nonzero(h[:, 0] > 0)[:, 0], h[h[:, 0] > 0])",
    ],
    "effects": [
        "LOG.append(tuple(h.shape))",
        "self.calls += 1",
        "self.seen = h.detach()",
        "LOG.append(h.detach().clone())",
        "METRICS['last'] = h.shape[0]",
        "self.kept = h.detach() + self.kept.sum()\nh = h + self.kept.sum()||self.kept = torch.zeros(1, 4)",
        "self.trail.append(h.detach().sum())\nh = h * len(self.trail)||self.trail = []",
    ],
    "stored": [  # tensors in attributes, which the script looks at and takes gradients from
        "self.kept_a = h",
        "self.kept_a = h * 2",
        "self.kept_a = h[:, 1:]",
        "self.kept_a = x",
        "self.kept_a = self.bias * 2",
        "self.kept_b = g.detach()",
        "self.kept_b = (h, g * 3)",
        "self.kept_b = h\nh = self.kept_b * 2",
        "self.kept_b = h * 1\nself.kept_b.mul_(2)",
        "self.kept_b = h.sum()\nself.kept_b = self.kept_b + 1",
        "with torch.no_grad():\n    self.kept_a = h * 2",
        "if x.shape[0] > 2:\n    self.kept_b = h.exp()",
        "if h.sum() > 0:\n    self.kept_b = h.tanh()",
        "h = self.leaves(h)||self.leaves = Leaves()",
        "h = self.leaves(self.leaves(h))||self.leaves = Leaves()",
        "if self.training:\n    self.kept_c = h.mean(0).detach()\nelse:\n    h = h + self.kept_c||self.kept_c = torch.zeros(4)",
        "self.kept_a = None",
        "self.kept_a = h.argmax(-1)",
    ],
    "state": [
        "h = h * SWITCH['k']",
        "h = h * self.schedule.value()||self.schedule = Schedule()",
        "h = h * CLOSED()",
        "h = h * type(self).factor",
        "h = h * float(ARRAY[0])",
        "h = h * GLOBAL",
        "h = h * (2.0 if 'k' in NAMES else 0.5)",
        "h = h * RECENT[-1]",
        "h = h * NESTED['a'][0]['b']",
        "self.fifo.append(self.fifo.popleft())\nh = h * self.fifo[0]||self.fifo = collections.deque([0.5, 1.5, 2.5])",
        "self.names.add(len(self.names))\nh = h * len(self.names)||self.names = set()",
        "self.cache.setdefault(x.shape[0], 0.5)\nh = h * len(self.cache)||self.cache = {}",
        "h = h * self.options.get('gain', 2.0)||self.options = {}",
    ],
    "parts": [
        "h = checkpoint(self.second, h, use_reentrant=False)",
        "h = checkpoint(lambda a: torch.tanh(self.first(a)) * self.bias, h, use_reentrant=False)",
        "h = torch.func.functional_call(self.second, {'weight': self.matrix}, (h,))",
        "h = self.inner(h)||self.inner = WRAP(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))",
        "h = self.shared(self.first(h))||self.shared = self.second",
        "h = F.dropout(h, 0.0, self.training)",
        "h = self.zero(h)||self.zero = nn.Dropout(0.0)",
        "h = self.tower(h) + self.tower(g)||self.tower = Tower()",
        "h = self.stack(h)||self.stack = nn.Sequential(Tower(), nn.Identity(), Tower())",
        "h = self.attend(h[None], g[None], g[None])[0][0]||self.attend = nn.MultiheadAttention(4, 2, batch_first=True)",
        "h = self.gru(h[None])[0][0]||self.gru = nn.GRU(4, 4, batch_first=True)",
    ],
    "wide": [  # gradients of more than 4 KB, which the engine may put where activations were
        "h = self.down(F.gelu(self.up(h)))||self.up, self.down = nn.Linear(4, 200), nn.Linear(200, 4)",
        "h = F.linear(torch.tanh(F.linear(h, self.large)), self.large.t()) * 0.1||self.large = nn.Parameter(torch.randn(300, 4))",
        "h = h + self.words(torch.arange(x.shape[0]) * 7)||self.words = nn.Embedding(300, 4)",
        "h = h + self.rows[: x.shape[0]] * self.rows.mean()||self.rows = nn.Parameter(torch.randn(400, 4))",
        "h = F.layer_norm(self.over(h), (160,), self.gain)[:, :4]||self.over, self.gain = nn.Linear(4, 160), nn.Parameter(torch.ones(160))",
        "h = self.odd(h) if x.shape[0] % 2 else h * 2||self.odd = nn.Sequential(nn.Linear(4, 256), nn.Tanh(), nn.Linear(256, 4))",
        "with torch.no_grad():\n    a = self.still(h)\nh = h + a.sum(-1, keepdim=True) * 0.01||self.still = nn.Linear(4, 256)",
        "h = self.words(torch.arange(x.shape[0])) + F.linear(h, self.words.weight)[:, 5:9]||self.words = nn.Embedding(300, 4)",
    ],
    "rebind": [
        "old = self.state\nself.state = h.detach().mean(0)\nh = h + old * self.state||self.register_buffer('state', "
        "torch.ones(4))",
        "self.state = self.state + 1\nself.state.mul_(0.5)\nh = h * self.state||self.register_buffer('state', "
        "torch.ones(4))",
        "h = h + self.state\nself.state.copy_(g.detach().sum(0))||self.register_buffer('state', torch.ones(4))",
        "self.state[x.shape[0] % 4] = 2.0\nh = h * self.state||self.register_buffer('state', torch.ones(4))",
        "self.held.state.add_(1)\nh = h * self.held.state||self.held = Holder()",
    ],
    "hooks": [
        "h = self.hooked(h)||self.hooked = nn.Linear(4, 4)\nself.hooked.register_forward_hook(lambda m, a, out: out * "
        "2)",
        "h = self.looked(h)||self.looked = nn.Linear(4, 4)\nself.looked.register_forward_hook(lambda m, a, out: "
        "LOG.append(tuple(out.shape)))",
        "h = self.before(h)||self.before = nn.Linear(4, 4)\nself.before.register_forward_pre_hook(lambda m, a: (a[0] + "
        "1,))",
        "h = self.back(h)||self.back = nn.Linear(4, 4)\nself.back.register_full_backward_hook(lambda m, gi, go: (gi[0] "
        "* 2,))",
        "h = h * 1\nif h.requires_grad:\n    h.register_hook(lambda grad: grad * 3)",
        "h = h * 1\nif h.requires_grad:\n    h.retain_grad()\n    LOG.append(tuple(h.shape))",
        "h = self.feature(h)||self.feature = nn.Linear(4, 4)\nself.feature.register_forward_hook(keep_feature)",
        "h = self.deep(h)||self.deep = nn.Sequential(nn.Linear(4, 4), "
        "nn.Tanh())\nself.deep[0].register_forward_hook(keep_feature)",
        "h = self.named(a=h)||self.named = Named()\nself.named.register_forward_pre_hook(lambda m, a, k: (a, {'a': "
        "k['a'] * 2}), with_kwargs=True)",
        "h = self.pre(h)||self.pre = nn.Linear(4, 4)\nself.pre.register_full_backward_pre_hook(lambda m, go: (go[0] * "
        "2,))",
        "h = self.tracked(h)||self.tracked = nn.Linear(4, 4)\nself.tracked.register_forward_hook("
        "lambda m, a, out: out.register_hook(lambda grad: LOG.append(grad.clone())) and None if out.requires_grad else "
        "None)",
        "h = self.weighted(h)||self.weighted = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))",
    ],
    "functions": ["h = Reverse.apply(h)", "h = Two.apply(h, g)[0]", "h = Reverse.apply(self.first(h)) + g"],
    "early": ["h = reverse(h)", "h = self.function(h)||self.function = Reverse.apply"],
    "none": ["h = self.branch(h)||self.branch = Branch()", "h = Silent.apply(h, self.bias)", "h = Sparse.apply(h, self.bias)"],
}
RETURNS = {
    "base": ["h", "h.sum()", "(h, x)", "{'h': h, 'n': x.shape[0], 'none': None}", "[h, h]", "(h, h.detach())", "h, (h * 2, self.bias * 1)"],
    "two": ["(self.first(x), self.second(x))", "(h, self.bias * 2)", "(h.sum(), g)"],
}
STEPS = {
    "base": [
        "call(rows={rows})", "call(rows={rows}, back='twice')", "call(rows={rows}, back='some')", "call(rows={rows}, wants=True)",
        "call(rows={rows}, wants=True, back='none')", "call(rows={rows}, times=2)", "call(rows={rows}, grad=False)",
        "model.eval()", "model.train()", "optimize()", "model.zero_grad()", "model.zero_grad(set_to_none=False)",
        "model.bias.requires_grad_(not model.bias.requires_grad)", "model.second.requires_grad_(not model.second.weight.requires_grad)",
        "call(rows={rows}, scale={scale})", "call(rows={rows}, flag=True)", "call(rows={rows}, y=True)",
    ],
    "control": ["model.scale = {scale}", "model.mode = 'b'", "model.depth = {depth}", "model.factors[-1] = {scale}", "model.factors.append({scale})",
                "model.config.alpha = {scale}"],
    "empty": ["call(rows=0)", "call(rows=0, wants=True)"],
    "state": ["SWITCH['k'] = {scale}", "model.schedule = Schedule({scale})", "CELL[0] = {scale}", "type(model.net).factor = {scale}",
              "ARRAY[0] = {scale}", "globals().update(GLOBAL={scale})", "NAMES.clear()", "RECENT.append({scale})", "NESTED['a'][0]['b'] = {scale}",
              "model.eval()", "model.train()", "model.eval()", "model.options = {{'gain': {scale}}}"],
    "parts": ["model.load_state_dict({{k: v * 0.9 for k, v in model.state_dict().items()}})", "model.double()", "copied()",
              "call(rows={rows}, inference=True)", "model.first.weight.grad = torch.ones(4, 4)", "model.requires_grad_({flag})",
              "model.first.weight.data.mul_({scale})", "model.first.weight = nn.Parameter(torch.ones(4, 4))", "model.second = nn.Linear(4, 4)",
              "call(rows={rows}, times=2, back='some')", "call(rows={rows}, retain=True)", "model.apply(lambda m: m.train(m.training))",
              "model.first.weight.register_hook(lambda grad: grad * 2)"],
    "hooks": ["call(rows={rows}, features=True)", "call(rows={rows}, features=True, wants=True)",
              "model.second.register_forward_hook(lambda m, a, out: out * 0.5)", "model.first.register_forward_pre_hook(lambda m, a: LOG.append(1))"],
    "wide": ["LOG.extend(p.grad for p in model.parameters() if p.grad is not None)\nmodel.zero_grad()\ncall(rows={rows})",
             "views = [p.grad.view(-1).numpy() for p in model.parameters() if p.grad is not None]\nmodel.zero_grad()\ncall(rows={rows}, times=2)\n"
             "LOG.extend(torch.from_numpy(v.copy()) for v in views)",
             "for p in model.parameters():\n    p.grad = None if p.numel() > 600 else p.grad",
             "for p in model.parameters():\n    p.grad = torch.full_like(p, {scale})\ncall(rows={rows})", "call(rows={rows}, retain=True)"],
    "two": ["call(rows={rows}, back='each')", "call(rows={rows}, back='last')"],
    "surgery": ["prune.l1_unstructured(model.first, 'weight', 0.5)", "prune.remove(model.first, 'weight')",
                "parametrize.register_parametrization(model.second, 'weight', Symmetric())",
                "parametrize.remove_parametrizations(model.second, 'weight')",
                "torch.manual_seed(1)\nparametrizations.spectral_norm(model.second)", "model.first = nn.Sequential(model.first, nn.ReLU())", "model.second.register_parameter('bias', None)",
                "model.second.forward = lambda h: torch.tanh(h) * {scale}", "model.second.__class__ = Doubling",
                "model.first.weight.data = model.first.weight.data * {scale}", "model.second.weight = model.first.weight",
                "nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()).detach() * {scale}, model.parameters())",
                "model.first, model.second = model.second, model.first", "model.bias = nn.Parameter(model.bias.detach() * {scale})",
                "model.matrix.register_post_accumulate_grad_hook(lambda p: LOG.append(p.grad.clone()))"],
    "second": ["penalty(rows={rows})", "penalty(rows={rows}, of='parameters')", "functional(rows={rows}, scale={scale})",
               "functional(rows={rows}, scale={scale}, grad=True)", "lbfgs(rows={rows})", "transformed(rows={rows}, how='vmap')",
               "transformed(rows={rows}, how='jvp')", "transformed(rows={rows}, how='jacrev')", "checkpointed(rows={rows})"],
}  # fmt: skip
FEATURES = sorted({*GRAMMAR, *RETURNS, *STEPS} - {"base"})

SOURCE = '''
import collections
import types
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

LOG, METRICS, SWITCH, CELL, ARRAY, GLOBAL = [], {{}}, {{"k": 1.5}}, [1.25], np.array([0.75]), 1.125
NAMES, RECENT, NESTED, FEATURES = {{"k"}}, collections.deque([0.5, 1.5]), {{"a": [{{"b": 0.5}}]}}, []


def keep_feature(module, args, out):
    FEATURES.append(out)


def closed():
    cell = CELL
    return lambda: cell[0]


CLOSED = closed()


class Schedule:
    def __init__(self, rate=0.5):
        self.rate = rate

    def value(self):
        return self.rate


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return -grad * ctx.saved_tensors[0].cos()


class Two(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return x + y, x * 2

    @staticmethod
    def backward(ctx, a, b):
        return a * 3, b + a


class Silent(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return x * y

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Sparse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.set_materialize_grads(False)
        return x + y

    @staticmethod
    def backward(ctx, grad):
        return None if grad is None else grad * 2, None


reverse = Reverse.apply


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, h):
        return self.one(h) if h.sum() > 0.1 else torch.tanh(self.other(h))  # 0.1: a centred sum is not asked its sign


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, h):
        return h + torch.relu(self.b(self.a(h)))


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, *, a):
        return self.a(a)


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).t()


class Doubling(nn.Linear):
    def forward(self, h):
        return super().forward(h) * 2


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.zeros(4))


class Leaves(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.kept_a = nn.Linear(4, 4), None

    def forward(self, h):
        h = torch.tanh(self.inner(h))
        self.kept_a = h.square().mean()
        return h * 2


class Net(nn.Module):
    factor = 0.625

    def __init__(self):
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.matrix, self.bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
        self.mode, self.depth, self.scale, self.factors, self.calls = "a", 1, 1.5, [1.0, 0.5], 0
        self.config = types.SimpleNamespace(alpha=0.5)
{init}

    def forward(self, x, y=None, *, scale=1.0, flag=False):
        h, g = x, torch.tanh(x)
{forward}
        return {result}


def make():
    torch.manual_seed({seed})
    return Net()
'''


@dataclass
class Program:
    seed: int
    forward: list[str]
    result: str
    steps: list[str]

    def source(self) -> str:
        lines = [s.partition("||") for s in self.forward]
        init = dict.fromkeys(line for _, _, needs in lines for line in needs.splitlines())
        return SOURCE.format(seed=self.seed, result=self.result, init="\n".join(" " * 8 + line for line in init),
                             forward="\n".join(" " * 8 + line for text, _, _ in lines for line in text.splitlines()))

    def text(self) -> str:
        body = self.source()
        return body[body.index("class Net") :] + "\n# steps\n" + "\n".join(self.steps)


def program(seed: int, features: Collection[str]) -> Program:
    """The program of this number."""
    rng = random.Random(seed)
    wanted = [f for f in features if f in GRAMMAR and rng.random() < 0.4]
    forward: list[str] = []
    for _ in range(rng.randint(2, 7)):
        kind = rng.choice(["base", "base", *wanted])
        forward.append(rng.choice(GRAMMAR[kind]))
    kinds = ["base", "base", "base", *(f for f in features if f in RETURNS)]
    result = rng.choice(RETURNS[rng.choice(kinds)])
    kinds = ["base", "base", *(f for f in ("control", "empty", "two", "surgery", "second") if f in features)]
    kinds += [f for f in wanted if f in ("parts", "hooks", "state", "wide")]
    sizes = rng.sample((1, 2, 3, 5, 7), 2)
    steps = [f"call(rows={sizes[0]}, wants={rng.random() < 0.5})"]
    for _ in range(rng.randint(2, 7)):
        text = rng.choice(STEPS[rng.choice(kinds)])
        steps.append(text.format(rows=rng.choice(sizes), scale=rng.choice((0.5, 2.0, 1.5)), depth=rng.choice((0, 1, 2)), flag=rng.random() < 0.7))
    for statement in forward:  # what forward reads changes
        if statement in GRAMMAR["state"]:
            text = STEPS["state"][GRAMMAR["state"].index(statement)].format(scale=rng.choice((0.25, 3.0)))
            steps.insert(rng.randint(1, len(steps)), text)
    steps += ["optimize()", f"call(rows={sizes[0]})"]
    return Program(seed, forward, result, steps)


def flat(value: Any) -> list[Any]:
    """Leaves of a result, depth first."""
    if isinstance(value, dict):
        return [y for k, v in value.items() for y in [k, *flat(v)]]
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return [type(value).__name__, *[y for v in value for y in flat(v)]]
    return [value]


class Script:
    """One side: executes the program's source and its steps, and writes down what it sees."""

    def __init__(self, p: Program, wrap: Callable[[Any], Any]) -> None:
        name = f"user_program_{p.seed}.py"
        source = p.source()
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        self.space: dict[str, Any] = {"__name__": name}
        self.space["WRAP"] = wrap  # wrappers inside of the module
        exec(compile(source, name, "exec"), self.space)
        self.notes: list[tuple[str, Any]] = []
        self.errors = ""  # their texts
        self.n = 0
        self.seed = p.seed
        self.net = self.space["make"]()
        self.model = wrap(self.net)
        object.__setattr__(self.model, "net", self.net) if "net" not in self.model.__dict__ else None
        del self.model.__dict__["net"]
        self.space.update(model=self.model, call=self.call, optimize=self.optimize, copied=self.copied, penalty=self.penalty,
                          functional=self.functional, lbfgs=self.lbfgs, transformed=self.transformed,
                          checkpointed=self.checkpointed)  # fmt: skip
        for step in p.steps:
            try:
                exec(step.replace("type(model.net)", "Net"), self.space)
            except Exception as error:  # noqa: BLE001
                self.note(f"{step}: error", f"{type(error).__name__}")
                self.error = error
                self.errors += f" {error}"
                if "has to be run again" in str(error):
                    self.note("stopped", None)
                    return
            self.look(step)

    def note(self, what: str, value: Any) -> None:
        self.notes.append((what, value))

    def look(self, step: str) -> None:
        for name, param in self.net.named_parameters():
            self.note(f"{step}: gradient of {name}", None if param.grad is None else param.grad.clone())
        for name, buffer in self.net.named_buffers():
            self.note(f"{step}: buffer {name}", buffer.clone())
        self.note(f"{step}: log", flat(self.space["LOG"]))
        self.note(f"{step}: metrics", flat(self.space["METRICS"]))
        self.note(f"{step}: calls", (self.net.calls, getattr(self.net, "seen", None)))

    def stored(self) -> list[Any]:
        """What forward has put into attributes."""
        return [v for m in self.storing() for k in ("kept_a", "kept_b", "kept_c") for v in flat(vars(m).get(k))]

    def storing(self) -> list[Any]:
        """The modules that do so."""
        return [m for m in (self.net, getattr(self.net, "leaves", None)) if m is not None]

    def random(self, *shape: int) -> Tensor:
        self.n += 1
        return torch.randn(shape, generator=torch.Generator().manual_seed(self.seed * 1000 + self.n))

    def optimize(self) -> None:
        with torch.no_grad():
            for param in self.net.parameters():
                if param.grad is not None:
                    param -= 0.05 * param.grad.tanh()

    def copied(self) -> None:
        """The script goes on with a copy."""
        self.model = self.space["model"] = copy.deepcopy(self.model)
        self.net = getattr(self.model, "module", self.model)

    def total(self, x: Tensor) -> Tensor:
        """Of all results that have a gradient, in a way that tells them apart."""
        found = [t for t in flat(self.model(x)) if isinstance(t, Tensor) and t.requires_grad]
        return sum(((k + 1) * t.sin().sum() for k, t in enumerate(found)), x.sum())  # type: ignore[return-value]

    def penalty(self, rows: int, of: str = "input") -> None:
        """A loss made of first derivatives."""
        x = self.random(rows, 4).requires_grad_()
        to = [x] if of == "input" else [x, *[p for p in self.net.parameters() if p.requires_grad]]
        grads = torch.autograd.grad(self.total(x), to, create_graph=True, allow_unused=True)
        self.note("first derivatives", [None if g is None else g.detach().clone() for g in grads])
        sum((g.pow(2).sum() for g in grads if g is not None), x.sum()).backward()  # type: ignore[union-attr]
        self.note("gradient of the input", x.grad)

    def functional(self, rows: int, scale: float, grad: bool = False) -> None:
        """Other weights for one call."""
        x = self.random(rows, 4)
        weights = {k: (v.detach() * scale).requires_grad_(grad) for k, v in self.model.named_parameters()}
        found = [t for t in flat(torch.func.functional_call(self.model, weights, (x,))) if isinstance(t, Tensor)]
        self.note("with other weights", [t.detach().clone() for t in found])
        if grad and (found := [t for t in found if t.requires_grad]):
            torch.autograd.backward(found, [self.random(*t.shape) for t in found])
            self.note("gradients of other weights", [v.grad for v in weights.values()])

    def lbfgs(self, rows: int) -> None:
        """A closure that runs several times."""
        x, optimizer = self.random(rows, 4), torch.optim.LBFGS([p for p in self.net.parameters() if p.requires_grad], 0.01, 3)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.total(x)
            if loss.requires_grad:
                loss.backward()
            return loss

        self.note("closure", optimizer.step(closure).item())
        optimizer.zero_grad()

    def transformed(self, rows: int, how: str) -> None:
        """torch.func around the model."""
        x = self.random(rows, 4)

        def first(x: Tensor) -> Tensor:
            return next(t for t in flat(self.model(x)) if isinstance(t, Tensor))

        if how == "vmap":
            self.note(how, torch.func.vmap(first)(torch.stack([x, x * 2])).detach())
        elif how == "jvp":
            self.note(how, [t.detach() for t in torch.func.jvp(first, (x,), (x.cos(),))])
        else:
            self.note(how, torch.func.jacrev(first)(x).detach())

    def checkpointed(self, rows: int) -> None:
        """The model within a checkpoint of the script's, which runs it again as a whole (docs/SEMANTICS.md)."""
        x = self.random(rows, 4).requires_grad_()
        with torch.utils.checkpoint.set_checkpoint_early_stop(False):
            torch.utils.checkpoint.checkpoint(self.total, x, use_reentrant=False).backward()
        self.note("gradient of the input", x.grad)

    def call(self, rows: int, wants: bool = False, back: str = "once", times: int = 1, grad: bool = True, y: bool = False,
             inference: bool = False, retain: bool = False, features: bool = False, **kwargs: Any) -> None:  # fmt: skip
        leaves, outs, retained = [], [], []
        for _ in range(times):
            leaf = self.random(rows, 4).requires_grad_(wants)
            leaves.append(leaf)
            if y:
                kwargs["y"] = self.random(rows, 4)
            for m in self.storing():  # what is of a call before has had its backward
                vars(m).update({k: None for k in ("kept_a", "kept_b") if k in vars(m)})
            with torch.inference_mode() if inference else torch.set_grad_enabled(grad):
                outs.append(self.model(leaf * 1 if wants else leaf, **kwargs))
            self.note("result", [v.detach().clone() if isinstance(v, Tensor) else v for v in flat(outs[-1])])
            self.note("requires grad", [v.requires_grad for v in flat(outs[-1]) if isinstance(v, Tensor)])
            stored = self.stored()
            of_results = {id(v) for v in flat(outs[-1])}
            for v in stored:
                if isinstance(v, Tensor) and v.requires_grad and id(v) not in of_results:
                    v.retain_grad()
                    retained.append(v)
            self.note("stored", [v.detach().clone() if isinstance(v, Tensor) else v for v in stored])
            self.note("stored requires grad", [v.requires_grad for v in stored if isinstance(v, Tensor)])
            outs.append([v for v in stored if isinstance(v, Tensor) and v.grad_fn is not None])
        found = [t for out in outs for t in flat(out) if isinstance(t, Tensor) and t.requires_grad]
        taken, self.space["FEATURES"][:] = list(self.space["FEATURES"]), []
        self.note("features", [t.detach().clone() for t in taken])
        if features:
            taken = [t for t in taken if t.requires_grad]
            found += taken
            for t in taken:  # not of results: what lies between those of one call is not theirs (see ARCHITECTURE.md)
                t.retain_grad()
        found = list({id(t): t for t in found}.values())
        if back == "last":
            found = found[-1:]
        if not found or back == "none":
            return
        weights = [self.random(*t.shape) for t in found]
        if back == "some":
            some = [p for p in (self.net.first.weight, self.net.bias, *leaves) if p.requires_grad]
            self.note("some", torch.autograd.grad(found, some, weights, allow_unused=True, retain_graph=True) if some else None)
        if back == "twice":
            torch.autograd.backward(found, weights, retain_graph=True)
        if back == "each":
            for t, w in zip(found, weights, strict=True):
                t.backward(w)
        else:
            torch.autograd.backward(found, weights, retain_graph=retain)
        if features:
            self.note("gradients of features", [t.grad for t in taken])
        self.note("gradients of inputs", [leaf.grad for leaf in leaves])
        self.note("gradients of what is stored", [v.grad for v in retained])


def differs(a: Any, b: Any) -> str | None:
    """Why not the same."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{tuple(a.shape)} {a.dtype} against {tuple(b.shape)} {b.dtype}"
        if a.numel() == 0:
            return None
        try:
            x, y = a.detach().double(), b.detach().double()
        except RuntimeError as error:  # of a level of vmap that has ended: nobody can read it
            if "escaped" not in str(error):
                raise
            return None
        if not torch.equal(x.isnan(), y.isnan()) or not torch.equal(x.isinf(), y.isinf()):
            return f"{a} against {b}"
        x, y = (t.nan_to_num(0, 0, 0) for t in (x, y))
        error, scale = (x - y).abs().max().item(), y.abs().max().item()
        return None if error <= TOLERANCE * max(scale, 1e-3) else f"error {error:.3g} at scale {scale:.3g}"
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        if len(a) != len(b):
            return f"{len(a)} against {len(b)} entries"
        return next((d for d in map(differs, a, b) if d), None)
    if isinstance(a, float) and isinstance(b, float):
        return None if a == b or a != a and b != b or abs(a - b) <= TOLERANCE * abs(b) else f"{a} against {b}"
    return None if type(a) is type(b) and a == b else f"{a!r} against {b!r}"


def compare(p: Program, share: list[int] | None = None) -> str | None:
    """What differs first, or None. share: adds calls in the engine, all calls."""
    from ortmodule import ORTModule

    eager = Script(p, lambda m: m)
    ours = Script(p, ORTModule)
    if share is not None:
        report = ours.model.report()
        n = sum(g.forwards for g in report.graphs)
        share[0] += n
        share[1] += n + sum(e.calls for e in report.eager)
    for (what, mine), (other, theirs) in zip(ours.notes, eager.notes, strict=False):
        # Cases that are known: gradients for other outputs than before after an edit, which the wrapper refuses by
        # name; and an edit of what eager has saved, which makes no difference to a captured graph.
        if what == "stopped" or what != other and "modified by an inplace operation" in eager.errors:
            return None
        if what != other:
            error = getattr(ours, "error", None)
            # Nor does the wrapper raise where eager's graph has been freed by a backward of another result, though it
            # needed nothing that was freed (views that were edited in place).
            if other.endswith("error") and "backward through the graph a second time" in str(getattr(eager, "error", "")):
                return None
            if what.endswith("error") and "has to be run again" in str(error):
                return None
            # A third: what a Function keeps for backward is not known, so a second backward through it is one without
            # its graph.
            if what.endswith("error") and "backward through the graph a second time" in str(error) and ours.model.report().host:
                return None
            # Nor where a buffer that forward assigned in inference mode is written later: here it is a tensor as any.
            if other.endswith("error") and "Inplace update to inference tensor" in eager.errors:
                return None
            # A fourth: buffers that forward assigns are written in place, so a backward that waits for the old ones
            # fails.
            if "modified by an inplace operation" in str(error) and any(f"self.{b} =" in s for s in p.forward for b in ("state", "queue", "last")):
                return None
            # A fifth: equal computations (one weight in two layers) are one, and freed as one.
            if "backward through the graph a second time" in str(error) and any("second.weight = model.first" in s for s in p.steps):
                return None
            # A sixth: forward cannot be run again in PyTorch where it edits a tensor that is no buffer.
            if "runs forward again, which edits" in str(error):
                return None
            # A seventh: PyTorch's own operators whose results nobody reads are not run.
            if what == "result" and "sequence length to be larger than 0" in str(getattr(eager, "error", "")):
                return None
            return f"{what} against {other}: {error if error is not None else getattr(eager, 'error', None)!r}"
        difference = differs(mine, theirs)
        if difference:
            return f"{what}: {difference}"
    return None if len(ours.notes) == len(eager.notes) else "one side stopped early"


def smaller(p: Program) -> Program:
    """Leaves statements and steps out as long as the two sides still differ."""
    while True:
        options = [replace(p, forward=p.forward[:i] + p.forward[i + 1 :]) for i in range(len(p.forward))]
        options += [replace(p, steps=p.steps[:i] + p.steps[i + 1 :]) for i in range(len(p.steps))]
        options += [replace(p, result="h")] * (p.result != "h")
        for option in options:
            if fails(option):
                p = option
                break
        else:
            return p


def fails(p: Program, share: list[int] | None = None) -> str | None:
    """Runs both sides in fp64, quietly."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return compare(p, share)
    finally:
        torch.set_default_dtype(before)
        linecache.cache.pop(f"user_program_{p.seed}.py", None)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int)
    parser.add_argument("--without", default="", help=f"features left out, of: {', '.join(FEATURES)}")
    parser.add_argument("--only", default="", help="features beside base")
    parser.add_argument("--keep-going", action="store_true")
    parser.add_argument("--show", action="store_true", help="print the programs and do not run them")
    a = parser.parse_args(arguments)
    unknown = {*a.without.split(","), *a.only.split(",")} - {"", *FEATURES}
    if unknown:
        parser.error(f"unknown features {sorted(unknown)}")
    features = [f for f in FEATURES if f not in a.without.split(",") and (not a.only or f in a.only.split(","))]
    failed, share = 0, [0, 0]
    for seed in range(a.first, a.last):
        p = program(seed, features)
        if a.show:
            print(p.text())
            continue
        difference = fails(p, share)
        if difference:
            failed += 1
            small = smaller(p)
            print(f"--- program {seed}: {fails(small)}\n{small.text()}\n", flush=True)
            if not a.keep_going:
                return 1
    print(f"{a.last - a.first} programs, {failed} differ; {share[0]} of {share[1]} calls in the engine")
    return bool(failed)


if __name__ == "__main__":
    import logging

    logging.getLogger("ortmodule").setLevel(logging.ERROR)
    sys.exit(main(sys.argv[1:]))
