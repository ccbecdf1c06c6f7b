"""The lists of csrc/graph/facts.h, by ctypes."""

from __future__ import annotations

import ctypes as C

import engine

IDS, BYTES = C.POINTER(C.c_uint32), C.POINTER(C.c_uint8)


class Lists(C.Structure):
    _fields_ = [("first", IDS), ("node", IDS)]

    def of(self, key: int) -> list[int]:
        return self.node[self.first[key] : self.first[key + 1]]


class Facts(C.Structure):
    _fields_ = [("g", C.c_void_p), ("root", IDS), ("users", Lists), ("holders", Lists), ("held", BYTES), ("root_held", BYTES), ("live", BYTES)]


def facts(g: engine.Graph) -> Facts:
    engine.lib.om_facts_new.restype = C.POINTER(Facts)
    engine.lib.om_facts_new.argtypes = [C.c_void_p, C.c_void_p]
    f = engine.lib.om_facts_new(g.cx.p, g.p)
    assert f
    return f.contents


def release(g: engine.Graph, f: Facts) -> None:
    engine.lib.om_free(g.cx.p, C.byref(f))
