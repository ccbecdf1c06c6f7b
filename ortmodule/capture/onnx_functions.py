"""Inference meaning of the ortmodule operators in standard ONNX, as model-local functions, so that onnxruntime runs a
captured file.

An operator whose nodes in one graph need different bodies (label smoothing with and without, say) gets none: the file
stays valid, and only runtimes that know the operator run it. The engine reads the operators, never the bodies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx

_HEAD = '<domain: "ortmodule", opset_import: ["" : 23]>\n'


def _function(text: str) -> onnx.FunctionProto:
    from onnx import parser

    return parser.parse_function(_HEAD + text)


def _attr(node: onnx.NodeProto, name: str) -> Any:
    from onnx import helper

    return next((helper.get_attribute_value(a) for a in node.attribute if a.name == name), None)


def _identity(name: str, ins: str) -> str:
    return f"{name} ({ins}) => (y)\n{{ y = Identity ({ins.split(',')[0]}) }}"


def _near_zero(name: str, body: str) -> str:
    return f"{name} (x) => (y)\n{{ one_f = Constant <value_float = 1.0> ()\n one = CastLike (one_f, x)\n {body} }}"


def _gamma(name: str, tail: str, series: list[float]) -> str:
    """Of w = x, or of 1 - x below 1/2 (reflection), which is shifted to y = w + 10; z = 1 / y, p: the asymptotic
    series in z^2 but for its first term, a_0. In double: runtimes lack these functions for most types anyway."""
    lines = [
        """wide = Cast <to = 11> (x)
    one = Constant <value = double {1.0}> ()
    half = Constant <value = double {0.5}> ()
    pi = Constant <value = double {3.14159265358979323846}> ()
    low = Less (wide, half)
    reflected = Sub (one, wide)
    w_0 = Where (low, reflected, wide)
    nearest = Round (wide)
    rest = Sub (wide, nearest)
    angle = Mul (pi, rest)
    sine = Sin (angle)
    cosine = Cos (angle)
    tangent = Div (sine, cosine)
    cot = Div (pi, tangent)
    size = Abs (sine)
    turn = Div (pi, size)
    product_0 = Identity (w_0)
    sum_0 = Div (one, w_0)"""
    ]
    for k in range(1, 10):
        lines += [f"w_{k} = Add (w_{k - 1}, one)", f"product_{k} = Mul (product_{k - 1}, w_{k})",
                  f"part_{k} = Div (one, w_{k})", f"sum_{k} = Add (sum_{k - 1}, part_{k})"]  # fmt: skip
    lines += ["product = Identity (product_9)", "sum = Identity (sum_9)", "y = Add (w_9, one)", "z = Div (one, y)"]
    lines += ["zz = Mul (z, z)"]
    lines += [f"a_{k} = Constant <value = double {{{a!r}}}> ()" for k, a in enumerate(series)]
    last = len(series) - 1
    at = f"a_{last}"
    for k in range(last - 1, 0, -1):
        lines += [f"m_{k} = Mul ({at}, zz)", f"h_{k} = Add (m_{k}, a_{k})"]
        at = f"h_{k}"
    body = "\n".join([*lines, f"p = Identity ({at})", tail, "out = CastLike (res, x)"])
    return f"{name} (x) => (out) {{\n{body}\n}}"


_ATAN2 = """Atan2 (y, x) => (out) {
    zero_f = Constant <value_float = 0.0> ()
    zero = CastLike (zero_f, x)
    pi_d = Constant <value = double {3.14159265358979323846}> ()
    pi = CastLike (pi_d, x)
    ratio = Div (y, x)
    near = Atan (ratio)
    below = Less (y, zero)
    minus = Neg (pi)
    turn = Where (below, minus, pi)
    left = Less (x, zero)
    other = Add (near, turn)
    res = Where (left, other, near)
    none_y = Equal (y, zero)
    right = Not (left)
    flat = And (none_y, right)
    out = Where (flat, zero, res)
}"""

_GROUPED = """GroupedMatMul (x, w, ends) => (y) {
    zero = Constant <value = int64 {0}> ()
    one = Constant <value = int64 {1}> ()
    first = Constant <value = int64[1] {0}> ()
    second = Constant <value = int64[1] {1}> ()
    all = Constant <value = int64[1] {-1}> ()
    wide = Unsqueeze (x, first)
    every = MatMul (wide, w)
    before = Slice (ends, first, all)
    starts = Concat <axis = 0> (first, before)
    from = Unsqueeze (starts, second)
    to = Unsqueeze (ends, second)
    x_shape = Shape (x)
    rows_1 = Gather (x_shape, first)
    rows = Squeeze (rows_1)
    r = Range (zero, rows, one)
    behind = GreaterOrEqual (r, from)
    ahead = Less (r, to)
    inside = And (behind, ahead)
    column = Unsqueeze (inside, all)
    none_f = Constant <value_float = 0.0> ()
    none = CastLike (none_f, x)
    kept = Where (column, every, none)
    y = ReduceSum <keepdims = 0> (kept, first)
}"""

_LOG_CUMSUM_EXP = """LogCumSumExp (x) => (y) {
    zero = Constant <value = int64 {0}> ()
    one = Constant <value = int64 {1}> ()
    all = Constant <value = int64[1] {-1}> ()
    row = Constant <value = int64[1] {-2}> ()
    x_shape = Shape (x)
    n_1 = Gather (x_shape, all)
    n = Squeeze (n_1)
    i = Range (zero, n, one)
    down = Unsqueeze (i, all)
    later = Greater (i, down)
    rows = Unsqueeze (x, row)
    none_f = Constant <value_float = -1.0> ()
    zero_f = Constant <value_float = 0.0> ()
    infinite_f = Div (none_f, zero_f)
    infinite = CastLike (infinite_f, x)
    kept = Where (later, infinite, rows)
    y = ReduceLogSumExp <keepdims = 0> (kept, all)
}"""

_SEARCH_SORTED = """SearchSorted <right> (sorted, v) => (y) {
    all = Constant <value = int64[1] {-1}> ()
    row = Constant <value = int64[1] {-2}> ()
    rows = Unsqueeze (sorted, row)
    column = Unsqueeze (v, all)
    less = Less (rows, column)
    upto = LessOrEqual (rows, column)
    right_i = Constant <value_int: int = @right> ()
    to_right = Cast <to = 9> (right_i)
    too = And (upto, to_right)
    counts = Or (less, too)
    counted = Cast <to = 7> (counts)
    sum = ReduceSum <keepdims = 0> (counted, all)
    shape = Shape (v)
    y = Reshape (sum, shape)
}"""

_XLOGY = """XLogY (x, y) => (out) {
    zero_f = Constant <value_float = 0.0> ()
    zero = CastLike (zero_f, x)
    none = Equal (x, zero)
    log = Log (y)
    plain = Mul (x, log)
    kept = Where (none, zero, plain)
    nan = IsNaN (y)
    out = Where (nan, y, kept)
}"""


_BATCH_NORM = """BatchNorm <momentum, eps, training> (x, w, b, mean, var) => (y, new_mean, new_var) {
    rows = Constant <value = int64[3] {0, 0, -1}> ()
    flat = Reshape (x, rows)
    axes = Constant <value = int64[2] {0, 2}> ()
    column = Constant <value = int64[3] {1, -1, 1}> ()
    own_mean = ReduceMean <keepdims = 0> (flat, axes)
    own_mean_c = Reshape (own_mean, column)
    centred = Sub (flat, own_mean_c)
    squares = Mul (centred, centred)
    own_var = ReduceMean <keepdims = 0> (squares, axes)
    training_i = Constant <value_int: int = @training> ()
    bool_training = Cast <to = 9> (training_i)
    use_mean = Where (bool_training, own_mean, mean)
    use_var = Where (bool_training, own_var, var)
    use_mean_c = Reshape (use_mean, column)
    eps_f = Constant <value_float: float = @eps> ()
    eps_t = CastLike (eps_f, x)
    var_eps = Add (use_var, eps_t)
    std = Sqrt (var_eps)
    slope = Div (w, std)
    slope_c = Reshape (slope, column)
    shifted = Sub (flat, use_mean_c)
    scaled = Mul (shifted, slope_c)
    b_c = Reshape (b, column)
    y_flat = Add (scaled, b_c)
    x_shape = Shape (x)
    y = Reshape (y_flat, x_shape)
    total = Size (x)
    channels = Size (w)
    count = Div (total, channels)
    one_i = Constant <value = int64 {1}> ()
    count_1 = Sub (count, one_i)
    two_i = Constant <value = int64 {2}> ()
    least = Max (count_1, one_i)
    count_f = CastLike (count, x)
    least_f = CastLike (least, x)
    unbias = Div (count_f, least_f)
    unbiased = Mul (own_var, unbias)
    momentum_f = Constant <value_float: float = @momentum> ()
    m = CastLike (momentum_f, x)
    mean_step = Sub (own_mean, mean)
    mean_part = Mul (m, mean_step)
    mean_new = Add (mean, mean_part)
    var_step = Sub (unbiased, var)
    var_part = Mul (m, var_step)
    var_new = Add (var, var_part)
    new_mean = Where (bool_training, mean_new, mean)
    new_var = Where (bool_training, var_new, var)
}"""

# fmod, put right where its sign is not the divisor's.
_REMAINDER = """{name} (a, b) => (y) {{
    m = Mod <fmod = 1> (a, b)
    zero_f = Constant <value_float = 0.0> ()
    zero = CastLike (zero_f, a)
    m_low = Less (m, zero)
    b_low = Less (b, zero)
    unlike = Xor (m_low, b_low)
    is_zero = Equal (m, zero)
    some = Not (is_zero)
    turn = And (unlike, some)
    m_y = Add (m, b)
    {tail} }}"""

# One channel at a time, convolved with the rows of an identity.
_IM2COL = """Im2Col <kernel_shape, strides, pads, dilations> (x) => (y) {
    kernel = Constant <value_ints: ints = @kernel_shape> ()
    taps = ReduceProd <keepdims = 1> (kernel)
    square = Concat <axis = 0> (taps, taps)
    zeros = ConstantOfShape (square)
    eye_f = EyeLike (zeros)
    eye = CastLike (eye_f, x)
    one = Constant <value = int64[1] {1}> ()
    rest = Constant <value = int64[1] {-1}> ()
    w_shape = Concat <axis = 0> (taps, one, kernel)
    w = Reshape (eye, w_shape)
    size = Shape <start = 2> (x)
    flat_shape = Concat <axis = 0> (rest, one, size)
    flat = Reshape (x, flat_shape)
    columns = Conv <strides: ints = @strides, pads: ints = @pads, dilations: ints = @dilations> (flat, w)
    images = Shape <start = 0, end = 1> (x)
    channels = Shape <start = 1, end = 2> (x)
    rows = Mul (channels, taps)
    y_shape = Concat <axis = 0> (images, rows, rest)
    y = Reshape (columns, y_shape)
}"""

# Every element beside those up to it, 1 in the place of others.
_CUMPROD = """CumProd (x) => (y) {
    n = Shape <start = -1> (x)
    square = Concat <axis = 0> (n, n)
    one_i = Constant <value = int64[1] {1}> ()
    ones = Expand (one_i, square)
    lower = Trilu <upper = 0> (ones)
    mask = Cast <to = 9> (lower)
    axis = Constant <value = int64[1] {-2}> ()
    last = Constant <value = int64[1] {-1}> ()
    beside = Unsqueeze (x, axis)
    one = CastLike (one_i, x)
    terms = Where (mask, beside, one)
    y = ReduceProd <keepdims = 0> (terms, last)
}"""



def _adaptive_avg_pool() -> str:
    """Windows of the last three axes (of size 1 where there are fewer), one axis at a time: the last is gathered into
    its windows, what is beyond a window's end counts 0, and it becomes the first for the next to be the last."""
    axis = """in_{i} = Gather (dims, at_{i})
    out_{i} = Gather (sizes, at_{i})
    window_{i} = Range (zero, out_{i}, one)
    behind_{i} = Add (window_{i}, one)
    begin_{i} = Mul (window_{i}, in_{i})
    low_{i} = Div (begin_{i}, out_{i})
    end_{i} = Mul (behind_{i}, in_{i})
    below_{i} = Sub (out_{i}, one)
    up_{i} = Add (end_{i}, below_{i})
    high_{i} = Div (up_{i}, out_{i})
    count_{i} = Sub (high_{i}, low_{i})
    most_{i} = ReduceMax <keepdims = 0> (count_{i})
    step_{i} = Range (zero, most_{i}, one)
    low_column_{i} = Unsqueeze (low_{i}, last)
    high_column_{i} = Unsqueeze (high_{i}, last)
    wide_{i} = Add (low_column_{i}, step_{i})
    inside_{i} = Less (wide_{i}, high_column_{i})
    bound_{i} = Sub (in_{i}, one)
    place_{i} = Min (wide_{i}, bound_{i})
    got_{i} = Gather <axis = 3> (x_{i}, place_{i})
    kept_{i} = Where (inside_{i}, got_{i}, none)
    sum_{i} = ReduceSum <keepdims = 0> (kept_{i}, last)
    divisor_{i} = CastLike (count_{i}, x)
    mean_{i} = Div (sum_{i}, divisor_{i})
    x_{next} = Transpose <perm = [0, 3, 1, 2]> (mean_{i})
    """
    places = "".join(f"at_{i} = Constant <value = int64 {{{i}}}> ()\n" for i in range(3))
    axes = "".join(axis.format(i=i, next=i - 1 if i else "end") for i in (2, 1, 0))
    return f"""AdaptiveAvgPool <output_size> (x) => (y) {{
    zero = Constant <value = int64 {{0}}> ()
    one = Constant <value = int64 {{1}}> ()
    last = Constant <value = int64[1] {{-1}}> ()
    far = Constant <value = int64[1] {{1000}}> ()
    behind = Constant <value = int64[1] {{-3}}> ()
    ones = Constant <value = int64[3] {{1, 1, 1}}> ()
    none_f = Constant <value_float = 0.0> ()
    none = CastLike (none_f, x)
    size = Constant <value_ints: ints = @output_size> ()
    all_sizes = Concat <axis = 0> (ones, size)
    sizes = Slice (all_sizes, behind, far)
    x_dims = Shape <start = 2> (x)
    all_dims = Concat <axis = 0> (ones, x_dims)
    dims = Slice (all_dims, behind, far)
    flat_shape = Concat <axis = 0> (last, dims)
    x_2 = Reshape (x, flat_shape)
    {places}
    {axes}
    lead = Shape <start = 0, end = 2> (x)
    y_shape = Concat <axis = 0> (lead, size)
    y = Reshape (x_end, y_shape)
}}"""


def _cdist(nodes: list[onnx.NodeProto]) -> str | None:
    powers = {_attr(n, "p") for n in nodes}
    if len(powers) > 1:
        return None
    p = powers.pop()
    if p == -1:
        tail = "y = ReduceMax <keepdims = 0> (d, last)"
    elif p == 0:
        tail = "z = Cast <to = 9> (d)\n c = CastLike (z, d)\n y = ReduceSum <keepdims = 0> (c, last)"
    elif p in (1, 2):
        tail = f"y = ReduceL{int(p)} <keepdims = 0> (d, last)"
    else:
        tail = ("p_f = Constant <value_float: float = @p> ()\n e = CastLike (p_f, d)\n q = Pow (d, e)\n"
                "s = ReduceSum <keepdims = 0> (q, last)\n r = Reciprocal (e)\n y = Pow (s, r)")
    return f"""Cdist <p> (a, b) => (y) {{
    row = Constant <value = int64[1] {{-2}}> ()
    column = Constant <value = int64[1] {{-3}}> ()
    last = Constant <value = int64[1] {{-1}}> ()
    a_row = Unsqueeze (a, row)
    b_column = Unsqueeze (b, column)
    difference = Sub (a_row, b_column)
    d = Abs (difference)
    {tail}
}}"""


def _recurrent(name: str, order: str, states: int, attrs: str) -> str:
    """The standard operator, whose gates stand in another order (`order`: which of torch's stands where)."""
    def turned(v: str) -> str:
        if len(order) == 1:
            return f"{v}_t = Identity ({v})\n"
        parts = [f"{v}_part{i}" for i in range(len(order))]
        return (f"{', '.join(parts)} = Split <axis = 0, num_outputs = {len(order)}> ({v})\n"
                f"{v}_t = Concat <axis = 0> ({', '.join(parts[int(i)] for i in order)})\n")

    held = ["h0", "c0"][:states]
    ends = ["hn", "cn"][:states]
    return f"""{name} <hidden_size, direction{", activations" if name == "RNN" else ""}>
    (x, w, r, bw, br, {", ".join(held)}) => (y, {", ".join(ends)}) {{
    lead = Constant <value = int64[1] {{0}}> ()
    one = Constant <value = int64[1] {{1}}> ()
    {"".join(turned(v) for v in ("w", "r", "bw", "br"))}
    w_1 = Unsqueeze (w_t, lead)
    r_1 = Unsqueeze (r_t, lead)
    b_t = Concat <axis = 0> (bw_t, br_t)
    b_1 = Unsqueeze (b_t, lead)
    {"".join(f"{s}_1 = Unsqueeze ({s}, lead)" + chr(10) for s in held)}
    steps = Shape <start = 0, end = 1> (x)
    steps_i = Cast <to = 6> (steps)
    samples = Shape <start = 1, end = 2> (x)
    lengths = Expand (steps_i, samples)
    y_1, {", ".join(e + "_1" for e in ends)} = {name} <hidden_size: int = @hidden_size, {attrs}
        direction: string = @direction> (x, w_1, r_1, b_1, lengths, {", ".join(s + "_1" for s in held)})
    y = Squeeze (y_1, one)
    {"".join(f"{e} = Squeeze ({e}_1, lead)" + chr(10) for e in ends)}
}}"""


# Smoothed: every class of a counted label gives smoothing / classes; without weights, for 'mean' and 'sum'.
_SMOOTH = """CrossEntropy <ignore_index, label_smoothing, reduction> (x, labels) => (loss) {{
    nll = SoftmaxCrossEntropyLoss <ignore_index: int = @ignore_index, reduction: string = @reduction> (x, labels)
    logp = LogSoftmax <axis = 1> (x)
    class_axis = Constant <value = int64[1] {{1}}> ()
    row_mean = ReduceMean <keepdims = 0> (logp, class_axis)
    ignore_i = Constant <value_int: int = @ignore_index> ()
    ignored = Equal (labels, ignore_i)
    counted = Not (ignored)
    counted_f = CastLike (counted, x)
    row = Mul (row_mean, counted_f)
    total = ReduceSum <keepdims = 0> (row)
    n_counted = ReduceSum <keepdims = 0> (counted_f)
    {smooth}
    s_f = Constant <value_float: float = @label_smoothing> ()
    s = CastLike (s_f, x)
    one = Constant <value_float = 1.0> ()
    one_t = CastLike (one, x)
    rest = Sub (one_t, s)
    a = Mul (rest, nll)
    b = Mul (s, smooth)
    loss = Sub (a, b)
}}"""


def _cross_entropy(nodes: list[onnx.NodeProto]) -> str | None:
    smooth = {(_attr(n, "label_smoothing") or 0.0) > 0 for n in nodes}
    reductions = {_attr(n, "reduction") for n in nodes}
    weighted = {len(n.input) > 2 for n in nodes}
    if smooth == {False}:
        if len(weighted) > 1:
            return None
        ins = "x, labels, weight" if weighted == {True} else "x, labels"
        return (f"CrossEntropy <ignore_index, label_smoothing, reduction> ({ins}) => (loss) {{\n"
                "loss = SoftmaxCrossEntropyLoss <ignore_index: int = @ignore_index, reduction: string = @reduction> "
                f"({ins}) }}")
    if smooth == {True} and weighted == {False} and len(reductions) == 1 and reductions < {b"mean", b"sum"}:
        return _SMOOTH.format(
            smooth="smooth = Div (total, n_counted)" if reductions == {b"mean"} else "smooth = Identity (total)"
        )
    return None


def _attention(nodes: list[onnx.NodeProto]) -> str | None:
    if any(_attr(n, "scale") is None for n in nodes):
        return None
    return ("Attention <is_causal, scale, dropout_p> (q, k, v, mask) => (y)\n"
            "{ y = Attention <is_causal: int = @is_causal, scale: float = @scale> (q, k, v, mask) }")


def functions(graph: onnx.GraphProto) -> list[onnx.FunctionProto]:
    """Bodies for the ortmodule operators that occur in the graph."""
    used: dict[str, list[onnx.NodeProto]] = {}
    for n in graph.node:
        if n.domain == "ortmodule":
            used.setdefault(n.op_type, []).append(n)
    texts: dict[str, str | None] = {
        "StopGradient": _identity("StopGradient", "x"),
        "StraightThrough": _identity("StraightThrough", "x, gradient_of"),
        "ZeroGradient": _identity("ZeroGradient", "x, overwritten"),
        "Embedding": "Embedding <padding_idx> (w, idx) => (y)\n{ y = Gather <axis = 0> (w, idx) }",
        "Log1p": _near_zero("Log1p", "s = Add (x, one)\n y = Log (s)"),
        "Expm1": _near_zero("Expm1", "e = Exp (x)\n y = Sub (e, one)"),
        "LogGamma": _gamma(
            "LogGamma",
            """whole = Log (turn)
    series = Mul (z, p)
    near = Add (a_0, series)
    lz = Log (y)
    less = Sub (y, half)
    first = Mul (less, lz)
    second = Sub (first, y)
    third = Add (second, near)
    shifts = Log (product)
    above = Sub (third, shifts)
    other = Sub (whole, above)
    res = Where (low, other, above)""",
            [0.9189385332046727, 1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156],
        ),
        "Digamma": _gamma(
            "Digamma",
            """lz = Log (y)
    square = Mul (z, z)
    series = Mul (square, p)
    halves = Mul (half, z)
    first = Sub (lz, halves)
    second = Sub (first, series)
    above = Sub (second, sum)
    other = Sub (above, cot)
    res = Where (low, other, above)""",
            [0.0, 1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760, 1 / 12],
        ),
        "GroupedMatMul": _GROUPED,
        "LogCumSumExp": _LOG_CUMSUM_EXP,
        "SearchSorted": _SEARCH_SORTED,
        "Atan2": _ATAN2,
        "XLogY": _XLOGY,
        "BatchNorm": _BATCH_NORM,
        "Im2Col": _IM2COL,
        "CumProd": _CUMPROD,
        "AdaptiveAvgPool": _adaptive_avg_pool(),
        "Cdist": _cdist(used["Cdist"]) if "Cdist" in used else None,
        "LSTM": _recurrent("LSTM", "0312", 2, ""),
        "GRU": _recurrent("GRU", "102", 1, "linear_before_reset = 1,"),
        "RNN": _recurrent("RNN", "0", 1, "activations: strings = @activations,"),
        "Remainder": _REMAINDER.format(name="Remainder", tail="y = Where (turn, m_y, m)"),
        "FloorDiv": _REMAINDER.format(
            name="FloorDiv",
            tail="r = Where (turn, m_y, m)\n whole = Sub (a, r)\n q = Div (whole, b)\n"
            " near = Round (q)\n plain = Div (a, b)\n none = Equal (b, zero)\n y = Where "
            "(none, plain, near)",
        ),
        "CrossEntropy": _cross_entropy(used.get("CrossEntropy", [])) if "CrossEntropy" in used else None,
        "Attention": _attention(used["Attention"]) if "Attention" in used else None,
    }
    return [_function(text) for name, text in texts.items() if name in used and text]
