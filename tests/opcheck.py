"""The one check every operator row goes through: forward and every gradient against eager PyTorch.

    check("softmax", [x], lambda x: torch.softmax(x, 1), "axis=1")

runs the operator through the engine's interpreter in fp64 (1e-10 relative to the largest element), with random output
gradients, then with strided, sliced and (where they broadcast) expanded operands, then in fp32 and on request bf16/f16,
where the error against fp64 must stay within `factor` times eager's own (plus one unit in the last place of the
result). How well eager does depends on the processor that its kernels were chosen for; operators that add many products
say how many (`terms`): rounding errors of a sum walk at random, half a unit times the root of its length, and that much
is allowed whatever eager's error is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

import engine

EPS = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float64: 2.0**-52}


def rand(
    *shape: int, per_axis: int = 1, seed: int | None = None, scale: float = 1.0, shift: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:  # fmt: skip
    """Normal numbers that are a function of the shape: `sum(shape) + per_axis * len(shape)` is the seed, unless one is
    given. Tests whose shapes are alike choose another per_axis."""
    g = torch.Generator().manual_seed(sum(shape) + per_axis * len(shape) if seed is None else seed)
    return (torch.randn(shape, dtype=torch.float64, generator=g) * scale + shift).to(dtype)


def text_of(op: str, inputs: Sequence[torch.Tensor | None], attrs: str, n_out: int) -> str:
    lines, args = ["graph {"], []
    for i, t in enumerate(inputs):
        if t is None:
            args.append("_")
            continue
        lines.append(f"  input x{i}: {engine.NAMES[engine.TORCH.index(t.dtype)]}[{', '.join(map(str, t.shape))}]")
        args.append(f"x{i}")
    rng = " rng=7" if op == "dropout" or "dropout=" in attrs else ""
    outs = [f"y{i}" for i in range(n_out)]
    lines.append(f"  {', '.join(outs)} = {op}({', '.join(args)}) {{{attrs}}}{rng}")
    lines += [f"  output {o}" for o in outs] + ["}"]
    return "\n".join(lines)


def layouts(t: torch.Tensor) -> list[torch.Tensor]:
    """The same values in other memory: transposed, with gaps, reversed in memory order."""
    res = []
    if t.dim() >= 2:
        res.append(t.transpose(0, -1).contiguous().transpose(0, -1))
    if t.dim() >= 1:
        gap = torch.zeros([2 * s + 1 for s in t.shape], dtype=t.dtype)[tuple(slice(1, 2 * s + 1, 2) for s in t.shape)]
        gap.copy_(t)
        res.append(gap)
    return res


def eager(ref: Callable, inputs: Sequence[torch.Tensor | None], wanted: Sequence[bool], dys: Sequence[torch.Tensor | None] | None):
    xs = [None if t is None else t.detach().clone().requires_grad_(w) for t, w in zip(inputs, wanted)]
    with torch.enable_grad():
        ys = ref(*xs)
    ys = [ys] if isinstance(ys, torch.Tensor) else list(ys)
    if dys is None:
        return [y.detach() for y in ys], []
    pairs = [(y, d) for y, d in zip(ys, dys) if d is not None and y.requires_grad]
    gs = torch.autograd.grad([y for y, _ in pairs], [x for x, w in zip(xs, wanted) if w], [d for _, d in pairs],
                             allow_unused=True) if pairs else [None] * sum(wanted)
    return [y.detach() for y in ys], list(gs)


def close(got: torch.Tensor | None, want: torch.Tensor | None, tol: float, what: str) -> None:
    if want is None or got is None:
        if want is not None:
            assert not torch.any(want != 0), f"{what}: no gradient, eager has one"
        if got is not None:
            assert not torch.any(got != 0), f"{what}: a gradient, eager has none"
        return
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, eager {tuple(want.shape)}"
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, eager {want.dtype}"
    if not want.is_floating_point():
        assert torch.equal(got, want), f"{what}: differs from eager"
        return
    assert torch.equal(torch.isnan(got), torch.isnan(want)), f"{what}: NaN elsewhere than eager"
    fin = torch.isfinite(want)
    assert torch.equal(got[~fin & ~torch.isnan(want)], want[~fin & ~torch.isnan(want)]), f"{what}: infinities differ"
    if fin.any():
        scale = want[fin].abs().max().item() or 1.0
        err = (got[fin].double() - want[fin].double()).abs().max().item()
        assert err <= tol * scale, f"{what}: error {err:.3e} relative to {scale:.3e} (allowed {tol:.1e})"


def check(op: str, inputs: Sequence[torch.Tensor | None], ref: Callable, attrs: str = "", n_out: int = 1, n_check: int | None = None,
          grad: bool | Sequence[bool] = True, tol: float = 1e-10, strides: bool = True, low: Sequence[torch.dtype] = (torch.float32,),
          factor: float = 2.0, graph: str | None = None, terms: int = 0,
          device: str | None = None) -> None:
    """inputs: fp64 (and integer / bool) tensors, None = left out. ref returns the first n_check (default n_out)
    outputs. grad: False, or which inputs get a gradient (default: all floats). graph: text with {t0}, {t1}... as input
    types instead of the single node. device: as in engine.run."""
    n_check = n_out if n_check is None else n_check
    fl = [t is not None and t.is_floating_point() for t in inputs]
    wanted = [f and (grad if isinstance(grad, bool) else g) for f, g in zip(fl, fl if isinstance(grad, bool) else grad)]
    gen = torch.Generator().manual_seed(11)
    ys, _ = eager(ref, inputs, [False] * len(inputs), None)
    dys = [torch.randn(y.shape, generator=gen, dtype=torch.float64).to(y.dtype) if y.is_floating_point() else None for y in ys]
    back = any(wanted) and any(d is not None for d in dys)

    def ours(xs, ds):
        live = [t for t in xs if t is not None]
        text = text_of(op, xs, attrs, n_out) if graph is None else graph.format(
            **{f"t{i}": f"{engine.NAMES[engine.TORCH.index(t.dtype)]}[{', '.join(map(str, t.shape))}]" for i, t in enumerate(xs) if t is not None})
        w = [int(w) for w, t in zip(wanted, xs) if t is not None]
        full = None if ds is None else list(ds) + [None] * (n_out - n_check)
        outs, grads = engine.run(text, live, w, full, device=device)
        return outs[:n_check], grads

    def compare(xs, want_y, want_g, ds, tol_y, what):
        got_y, got_g = ours(xs, ds)
        for i, (a, b) in enumerate(zip(got_y, want_y)):
            close(a, b, tol_y, f"{op} {{{attrs}}} {what} output {i}")
        for i, (a, b) in enumerate(zip(got_g, want_g)):
            close(a, b, tol_y, f"{op} {{{attrs}}} {what} gradient {i}")

    want_y, want_g = eager(ref, inputs, wanted, dys if back else None)
    ds = dys if back else None
    compare(inputs, want_y, want_g, ds, tol, "fp64")
    if strides:
        for k in range(2):
            xs = [t if t is None or len(layouts(t)) <= k else layouts(t)[k] for t in inputs]
            d2 = None if ds is None else [d if d is None or len(layouts(d)) <= k else layouts(d)[k] for d in ds]
            compare(xs, want_y, want_g, d2, tol, f"layout {k}")
    for dt in low:
        if not any(fl):
            break
        lo = [t.to(dt) if f else t for t, f in zip(inputs, fl)]
        hi = [t.double() if f else t for t, f in zip(lo, fl)]
        dl = None if ds is None else [None if d is None else d.to(dt) for d in ds]
        dh = None if dl is None else [None if d is None else d.double() for d in dl]
        exact_y, exact_g = eager(ref, hi, wanted, dh)
        eager_y, eager_g = eager(ref, lo, wanted, dl)
        got_y, got_g = ours(lo, dl)
        for i, (g, e, x) in enumerate([*zip(got_y, eager_y, exact_y), *zip(got_g, eager_g, exact_g)]):
            what = f"{op} {{{attrs}}} {dt} result {i}"
            if x is None or g is None or not x.is_floating_point():
                close(g, e, 0, what)
                continue
            fin = torch.isfinite(x)
            if not fin.any():
                continue
            scale = x[fin].abs().max().item()
            mine, theirs = (g.double() - x)[fin].abs().max().item(), (e.double() - x)[fin].abs().max().item()
            allowed = max(factor * theirs, 0.5 * EPS[torch.float32] * terms**0.5 * scale) + 2 * EPS[dt] * scale
            assert mine <= allowed, f"{what}: error {mine:.3e}, eager's own {theirs:.3e}, scale {scale:.3e}"
