"""The recurrent half of RNN, LSTM and GRU layers against loops in eager PyTorch and against torch's own layers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import engine
from opcheck import check, rand

LOW = (torch.float32, torch.bfloat16, torch.float16)
RELU, TANH, LSTM, GRU = range(4)
GATES = (1, 1, 4, 3)


def loop(kind: int, reverse: bool) -> Callable:
    def f(gx: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, h: torch.Tensor, c: torch.Tensor | None):
        ys: list[torch.Tensor] = []
        for x in reversed(gx.unbind(0)) if reverse else gx.unbind(0):
            k = h @ w.t() if b is None else h @ w.t() + b
            if kind == GRU:
                (xr, xz, xn), (hr, hz, hn) = x.chunk(3, 1), k.chunk(3, 1)
                r, z = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
                n = torch.tanh(xn + r * hn)
                h = (1 - z) * n + z * h
            elif kind == LSTM:
                i, f, g, o = (x + k).chunk(4, 1)
                c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
                h = torch.sigmoid(o) * torch.tanh(c)
            else:
                h = torch.tanh(x + k) if kind == TANH else torch.relu(x + k)
            ys.append(h)
        y = torch.stack(ys[::-1] if reverse else ys)
        return (y, c) if kind == LSTM else (y,)

    return f


def operands(kind: int, t: int, n: int, h: int, bias: bool = True, reverse: bool = False) -> list[torch.Tensor | None]:
    g = GATES[kind] * h
    if kind == RELU:  # nothing near the kink, on whose side rounding would put it
        gx, w, h0 = rand(t, n, g), rand(g, h, scale=0.5), rand(n, h, seed=4)
        state = h0
        for i in reversed(range(t)) if reverse else range(t):
            before = gx[i] + state @ w.t()
            gx[i] += before.sign() * 0.25
            state = torch.relu(before + before.sign() * 0.25)
        return [gx, w, None, h0, None]
    return [rand(t, n, g), rand(g, h, scale=0.5), rand(g) if kind == GRU and bias else None, rand(n, h, seed=4),
            rand(n, h, seed=5) if kind == LSTM else None]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("t,n,h", [(5, 3, 7), (1, 2, 4), (4, 1, 33), (7, 20, 5), (3, 0, 4), (2, 3, 1)])
@pytest.mark.parametrize("kind", range(4))
def test_recurrent(kind: int, t: int, n: int, h: int, reverse: bool) -> None:
    check("recurrent", operands(kind, t, n, h, reverse=reverse), loop(kind, reverse), f"kind={kind}, reverse={int(reverse)}", n_out=4,
          n_check=2 if kind == LSTM else 1, low=LOW, terms=100 + t * h, factor=3)  # 1 - tanh^2 magnifies the last bits of tanh


def test_without_a_bias() -> None:
    check("recurrent", operands(GRU, 4, 3, 5, False), loop(GRU, False), "kind=3", n_out=4, n_check=1)


@pytest.mark.parametrize("kind", range(4))
@pytest.mark.parametrize("which", range(5))
def test_only_what_is_wanted(kind: int, which: int) -> None:
    ins = operands(kind, 4, 3, 5)
    if ins[which] is not None:
        check("recurrent", ins, loop(kind, False), f"kind={kind}", n_out=4, n_check=2 if kind == LSTM else 1,
              grad=[i == which for i in range(5)])


def test_only_the_last_state_has_a_gradient() -> None:
    """No gradient arrives at y, or none at c."""
    ins = operands(LSTM, 4, 3, 5)
    for out in (0, 1):
        text = ("graph {\n input gx: f64[4, 3, 20]\n input w: f64[20, 5]\n input h: f64[3, 5]\n input c: f64[3, 5]\n"
                f" y, l, a, b = recurrent(gx, w, _, h, c) {{kind=2}}\n output {'yl'[out]}\n}}")
        xs = [t.clone().requires_grad_() for t in ins if t is not None]
        want = loop(LSTM, False)(xs[0], xs[1], None, xs[2], xs[3])[out]
        dy = rand(*want.shape, seed=9)
        want.backward(dy)
        (y,), grads = engine.run(text, [x.detach() for x in xs], [1, 1, 1, 1], [dy])
        assert (y - want).abs().max() < 1e-12
        for x, g in zip(xs, grads):
            assert (x.grad - g).abs().max() < 1e-12


@pytest.mark.parametrize("kind,layer", [(RELU, torch.nn.RNN), (TANH, torch.nn.RNN), (LSTM, torch.nn.LSTM), (GRU, torch.nn.GRU)])
def test_torchs_layers(kind: int, layer: type) -> None:
    torch.manual_seed(1)
    more = {} if layer is not torch.nn.RNN else {"nonlinearity": "relu" if kind == RELU else "tanh"}
    m = layer(6, 5, **more).double()
    x = rand(7, 3, 6)
    own = m.bias_ih_l0 if kind == GRU else m.bias_ih_l0 + m.bias_hh_l0
    gx = (x @ m.weight_ih_l0.t() + own).detach()
    zero = torch.zeros(3, 5, dtype=torch.float64)
    ins = [gx, m.weight_hh_l0.detach(), m.bias_hh_l0.detach() if kind == GRU else None, zero, zero if kind == LSTM else None]
    from opcheck import text_of

    outs, _ = engine.run(text_of("recurrent", ins, f"kind={kind}", 4), [t for t in ins if t is not None])
    y, last = m(x)
    assert (outs[0] - y).abs().max() < 1e-12
    if kind == LSTM:
        assert (outs[1] - last[1][0]).abs().max() < 1e-12


def test_same_bits_for_any_number_of_threads() -> None:
    ins = [t.float() for t in operands(LSTM, 6, 40, 33) if t is not None]
    text = ("graph {\n input gx: f32[6, 40, 132]\n input w: f32[132, 33]\n input h: f32[40, 33]\n input c: f32[40, 33]\n"
            " y, l, a, b = recurrent(gx, w, _, h, c) {kind=2}\n output y\n}")
    dy = rand(6, 40, 33).float()
    one = engine.Graph.parse(text, engine.Ctx(threads=False)).grad([1] * 4, [1]).run([*ins, dy], 5)
    two = engine.Graph.parse(text, engine.Ctx(threads=True)).grad([1] * 4, [1]).run([*ins, dy], 5)
    assert all(torch.equal(a, b) for a, b in zip(one, two))


@pytest.mark.parametrize(
    "node,words",
    [
        ("recurrent(gx, w, _, h, h) {kind=5}", ["kind 5"]),
        ("recurrent(gx, w, _, h, h) {kind=3}", ["3 times the hidden size"]),
        ("recurrent(gx, w, _, h, _) {kind=2}", ["c0 for LSTM"]),
        ("recurrent(gx, w, b, h, h) {kind=2}", ["b is for GRU"]),
        ("recurrent(gx, w, _, w, h) {kind=2}", ["h0", "does not fit"]),
    ],
)
def test_refused(node: str, words: list[str]) -> None:
    text = (f"graph {{\n input gx: f64[4, 3, 20]\n input w: f64[20, 5]\n input h: f64[3, 5]\n input b: f64[20]\n"
            f" y, l, a, c = {node}\n output y\n}}")
    with pytest.raises(engine.EngineError) as e:
        engine.run(text, [rand(4, 3, 20), rand(20, 5), rand(3, 5), rand(20)])
    assert all(w in str(e.value) for w in words), str(e.value)
