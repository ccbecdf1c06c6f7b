"""Size expressions: equal polynomials are one om_dim, printing parses back, evaluation agrees with Python's
integers."""

import ctypes as C

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import Ctx, EngineError, lib

lib.om_graph_new.restype = C.c_void_p
lib.om_graph_new.argtypes = [C.c_void_p]
lib.om_dim_eval.restype = C.c_int64
lib.om_dim_eval.argtypes = [C.c_void_p, C.c_int64, C.c_void_p]
lib.om_dim_parse.argtypes = [C.c_void_p, C.c_char_p, C.c_void_p]
lib.om_dim_print.argtypes = [C.c_void_p, C.c_int64, C.c_char_p, C.c_size_t]

SYMS = {"s0": 7, "s1": 5, "s2": 11}


class Dims:
    def __init__(self):
        self.cx = Ctx()
        self.g = lib.om_graph_new(self.cx.p)
        for name in SYMS:
            self.parse(name)

    def parse(self, text: str) -> int:
        d = C.c_int64()
        self.cx.check(lib.om_dim_parse(self.g, text.encode(), C.byref(d)))
        return d.value

    def print(self, d: int) -> str:
        buf = C.create_string_buffer(4096)
        lib.om_dim_print(self.g, d, buf, len(buf))
        return buf.value.decode()

    def eval(self, d: int) -> int:
        return lib.om_dim_eval(self.g, d, (C.c_int64 * 3)(*SYMS.values()))

    def __del__(self):
        lib.om_graph_free(self.g)


ATOM = st.one_of(st.sampled_from(sorted(SYMS)), st.integers(0, 9).map(str))
EXPR = st.recursive(ATOM, lambda e: st.one_of(
    st.tuples(e, st.sampled_from([" + ", " - ", "*"]), e).map(lambda t: f"({t[0]}{t[1]}{t[2]})"),
    st.tuples(st.sampled_from(["Max", "Min"]), e, e).map(lambda t: f"{t[0]}({t[1]}, {t[2]})"),
    st.tuples(e, st.integers(1, 6)).map(lambda t: f"({t[0]}//{t[1]})"),
    st.tuples(e, st.integers(1, 6)).map(lambda t: f"Mod({t[0]}, {t[1]})")), max_leaves=8)
PY = {"Max": max, "Min": min, "Mod": lambda a, b: a % b}


@settings(max_examples=300, deadline=None)
@given(EXPR)
def test_value_and_round_trip(text):
    d = Dims()
    x = d.parse(text)
    assert d.eval(x) == eval(text, {}, {**SYMS, **PY})
    assert d.parse(d.print(x)) == x


@pytest.mark.parametrize("a, b", [
    ("s0*12 + 3*s0", "15*s0"), ("(s0 + s1)*(s0 - s1)", "s0*s0 - s1*s1"), ("s1*s0*2", "2*(s0*s1)"), ("(s0*12)//12", "s0"),
    ("(s0*s1*4)//(2*s1)", "2*s0"), ("(s0 - 10)//5 + 1", "s0//5 - 1"), ("(3*s0 + s1 + 8)//3", "s0 + (s1 + 2)//3 + 2"),
    ("(s0 - Mod(s0, 4))//4", "s0//4"), ("3*s0 + 3*s1 - 3*Mod(s0 + s1, 4) + 1", "12*((s0 + s1)//4) + 1"), ("2*Mod(s0, 3) - 2*s0", "-6*(s0//3)"),
    ("Mod(s0*6, 3)", "0"), ("s0 - s0", "0"), ("Max(s0 + 2, s0)", "s0 + 2"), ("Min(s0, s1)", "Min(s1, s0)"), ("-(-3)", "3"), ("s0 - 5 + 5", "s0")])
def test_equal_expressions_are_one(a, b):
    d = Dims()
    assert d.parse(a) == d.parse(b), (d.print(d.parse(a)), d.print(d.parse(b)))


@pytest.mark.parametrize("text", ["", "s0 +", "(s0", "3 $ 4", "Foo(s0)", "(" * 500 + "1" + ")" * 500, "-" * 5000 + "1"])
def test_bad_text_is_refused(text):
    with pytest.raises(EngineError, match="size expression"):
        Dims().parse(text)


@pytest.mark.parametrize("text", ["s0*4611686018427387904", "Max(0, s0*4611686018427387904)", "9223372036854775807*s0//s0*s1", "*".join(["s2"] * 19),
                                  "(0 - 9223372036854775807 - 1)//(0 - 1) + s0"])  # fmt: skip
def test_what_64_bits_do_not_hold_is_said(text):
    d = Dims()
    assert d.eval(d.parse(text)) == -(2**63)


@pytest.mark.parametrize("text, value", [("s0*4611686018427387904 - 4611686018427387904*s0", 0), ("Mod(0 - 9223372036854775807 - s0, 0 - 1)", 0),
                                         ("Mod(0 - 9223372036854775807 - 1, 3)", 1), ("Mod(0 - 9223372036854775807 - 1, 0 - 1)", 0),
                                         # fmt: skip
                                         ("(0 - 9223372036854775807)//(0 - 1)", 2**63 - 1), ("(s0 - 8)//(0 - 1)", 1)])
def test_at_the_ends_of_64_bits(text, value):
    d = Dims()
    assert d.eval(d.parse(text)) == value


@pytest.mark.parametrize("text", ["-9223372036854775808", "(0 - 9223372036854775807 - 1)//(0 - 1)", "s0 - 9223372036854775807 - 1", "s0*(-9223372036854775808) - 3",
                                  "Max(s0, -9223372036854775808*s1)"])  # fmt: skip
def test_the_least_number_is_read_as_it_is_written(text):
    d = Dims()
    x = d.parse(text)
    assert d.parse(d.print(x)) == x
    with pytest.raises(EngineError, match="size expression"):
        d.parse("9223372036854775808")


def test_a_sum_of_many():
    d = Dims()
    many = d.parse(" + ".join(f"Max(s0, {i})" for i in range(500)))
    assert d.eval(many) == sum(max(7, i) for i in range(500))
    with pytest.raises(EngineError, match="size expression of more than 1024 terms"):
        d.parse(" + ".join(f"Max(s0, {i})" for i in range(600)))
