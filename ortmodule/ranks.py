"""Which rank is gone: in the error that the other ranks get, which is gloo's or NCCL's and names an address, or nobody.

begin     at a capture in a process group of several: opens a port that nobody serves, and says in the group's store
          where. The kernel answers there as long as this process is there, stopped or not.
explain   when a collective has failed here: says so in the store, then asks. Who has failed, too, is not gone; whose
          port is closed has ended; who is there and says nothing hangs, or works at something else.
named     a context (and decorator) that explains what fails inside; begin() puts the same around what trainings call:
          backward, forward of DDP and FSDP1, FSDP2's gathers, DeepSpeed's engines; and before the last words of a
          process that ends with the error of a collective, whoever has called it.

Invariants: nothing is sent, waited for or started in a thread until a collective fails; then the store, which may be
gone or hang itself, is asked in a thread that is not waited for longer than _STORE_S. What cannot be told is not said.
An error keeps its type, its traceback and its own words.
"""

from __future__ import annotations

import functools
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch import distributed as dist
from torch import nn

from . import accelerate
from . import torch_private as private

_STORE_S = 5.0  # until the store is taken to be gone
_CLOSED_S = 3.0  # from a connection that has been closed until its process has ended
_LATE_S = 15.0  # between the time-outs of ranks that wait for the same one; at most half a time-out
_FAILED = re.compile(r"gloo/|ProcessGroup\w+|Connection (closed|reset) by peer|Timed out waiting \d+ ?ms|NCCL"
                     r"|Application timeout caused pair closure")
_LATE = re.compile(r"[Tt]imed? ?out|[Tt]imeout")
_SAID = "\nortmodule: "


class _Group:
    """The default process group, as this process has met it. number: it is the n-th that this process has met, so that
    what an earlier one has left in the same store is not read."""

    def __init__(self, store: Any, number: int) -> None:
        self.store, self.key = ref(store), f"ortmodule.ranks/{number}/"
        self.rank, self.n = dist.get_rank(), dist.get_world_size()
        self.host = _host()
        self.first: list[str] | None = None  # where rank 0 is: it may keep the store
        self.looks = 10
        store.set(f"{self.key}{self.rank}", f"{self.host} {_address(store)} {_port()}")

    def look(self, store: Any) -> None:
        """For rank 0, which may come here later than this one."""
        self.looks -= 1
        with suppress(Exception):
            if store.check([f"{self.key}0"]):
                self.first = store.get(f"{self.key}0").decode().split()


_group: _Group | None = None
_met = 0
_listener: socket.socket | None = None


def several() -> bool:
    """Does this process train with others?"""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def begin() -> None:
    """This rank can be asked after from now on, and asks after others when a collective fails."""
    global _group, _met
    accelerate.tell()  # of processes that are not several, too
    if not several():
        return
    _patch()
    store = private.store()
    if store is None or (_group is not None and _group.store() is store):
        return
    try:
        _met += 1
        _group = _Group(store, _met)
    except Exception:  # no port, no store: errors stay as they are
        _group = None


def _patch() -> None:
    """Of what has been imported by now: what begins a collective there, or waits for one."""
    parallel = [(torch.autograd, "backward"), (nn.parallel.DistributedDataParallel, "forward")]
    if fsdp := sys.modules.get("torch.distributed.fsdp"):
        parallel.append((fsdp.FullyShardedDataParallel, "forward"))
        if private.has("fsdp_group"):
            parallel += [(private.fsdp_group, "unshard"), (private.fsdp_group, "wait_for_unshard")]
    if engine := getattr(sys.modules.get("deepspeed"), "DeepSpeedEngine", None):
        parallel += [(engine, "forward"), (engine, "backward"), (engine, "step")]
    if engine := getattr(sys.modules.get("deepspeed.runtime.pipe.engine"), "PipelineEngine", None):
        parallel += [(engine, "train_batch"), (engine, "eval_batch")]
    for owner, name in parallel:
        if not hasattr(getattr(owner, name), "_ortmodule_named"):
            setattr(owner, name, _around(getattr(owner, name)))
    if not hasattr(sys.excepthook, "_ortmodule_named"):
        sys.excepthook = _before(sys.excepthook)


def _before(hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def tell(kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, RuntimeError):
            explain(error)
        hook(kind, error, trace)

    tell._ortmodule_named = True  # type: ignore[attr-defined]
    return tell


def _around(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        group = _group
        if group is not None and group.first is None and group.looks and (store := group.store()) is not None:
            group.look(store)
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            explain(error)
            raise

    call._ortmodule_named = True  # type: ignore[attr-defined]
    return call


@contextmanager
def named() -> Iterator[None]:
    """`with ortmodule.ranks.named():` around a training: a collective that fails inside, whoever calls it, names in its
    error the ranks that have ended or hang. All ranks of the default process group enter it."""
    begin()
    try:
        yield
    except RuntimeError as error:
        explain(error)
        raise


def explain(error: BaseException) -> None:
    """Adds to the error of a collective which ranks are gone; leaves others, and what it cannot tell, as they are."""
    group, text = _group, str(error)
    if group is None or _SAID in text or not (_FAILED.search(text) or isinstance(error, dist.DistError)):
        return
    with suppress(Exception):  # of this search: the error at hand is the one to raise
        if said := _find(group, bool(_LATE.search(text))):
            error.args = (f"{text.rstrip()}{_SAID}{said}",)


def _find(group: _Group, late: bool) -> str | None:
    longest = min(_LATE_S, (private.patience() or 2 * _LATE_S) / 2)
    patience = longest if late else _CLOSED_S
    others = [r for r in range(group.n) if r != group.rank]
    began = time.monotonic()
    try:
        ask = _Store(group)
        ask.tell()
        doors = {r: _Door(group, ask.where(r)) for r in others}
    except _NoStore:
        return _without_store(group, began + _CLOSED_S)
    while True:
        open_ = {r: door.open() for r, door in doors.items()}
        kept = True
        try:
            failed = ask.failed()  # after the doors: who has failed says so before it ends
        except _NoStore:
            kept, failed = False, ask.ranks
        silent = [r for r in others if r not in failed]
        ended = [r for r in silent if open_[r] is False]
        passed = time.monotonic() - began
        if ended or not silent or not kept or passed > patience:
            break
        time.sleep(0.05)
    if not kept and not ended:
        if 0 not in failed:
            return _without_store(group, time.monotonic() + _CLOSED_S)
        if passed < patience / 2:  # rank 0 has failed with the others, and has gone with its store before it was time
            return None
    if kept:
        with suppress(_NoStore):
            ask.leave()
            if group.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                _keep(ask, doors, [r for r in silent if r not in ended], began + patience, longest)
    if ended:
        return f"{_ranks(ended)} ended: no such process is there any more"
    if not silent:
        return None
    away = [r for r in silent if open_[r] is None]
    there = [r for r in silent if open_[r]]
    said = f"in {passed:.0f} s after this error"
    return "; ".join(
        f"{_ranks(ranks)} not failed with the others {said}{why}"
        for ranks, why in ((there, ", and is there: it hangs, or works at something else"), (away, ""))
        if ranks
    )


def _keep(ask: _Store, doors: dict[int, _Door], silent: list[int], end: float, longest: float) -> None:
    """On rank 0, with which the store ends: until the others have looked. Who has not failed is waited for until this
    search ends; who searches, for the longest time that a search takes."""
    while True:
        now = time.monotonic()
        failed, left = ask.failed(), ask.left()
        silent = [r for r in silent if r not in failed and doors[r].open()]
        searching = [r for r in failed - left if r in doors and doors[r].open()]
        if not (silent and now < end) and not (searching and now < end + longest):
            return
        time.sleep(0.05)


def _without_store(group: _Group, end: float) -> str | None:
    keeper = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not keeper or group.rank == 0 or group.first is None:
        return None
    door = _Door(group, group.first)
    while (there := door.open()) and time.monotonic() < end:
        time.sleep(0.05)
    if there is False:
        return ("rank 0 has ended: no such process is there any more, nor the process group's store, which could tell "
                "whether another rank has ended before it")  # fmt: skip
    if there:
        return "rank 0 hangs: it is there, and the process group's store, which it keeps, does not answer"
    return None


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"


# --- the store -----------------------------------------------------------------------------------------


class _NoStore(Exception):
    """The process group's store is gone, or hangs."""


class _Store:
    """What ranks that have failed say to each other. Over a connection of its own: others may wait on the group's."""

    def __init__(self, group: _Group) -> None:
        self.group = group
        self.read = {"failed": 0, "left": 0}
        self.ranks: set[int] = set()  # who has told, as far as it has been read
        self.gone: set[int] = set()  # who has left
        self.inner = self._answer(self._connect)

    def _connect(self) -> Any:
        store = self.group.store()
        if store is None:
            raise _NoStore
        if (server := _server(store)) is not None:
            socket.create_connection(server, timeout=_STORE_S).close()  # clone() would try again for minutes
        return store.clone() if hasattr(store, "clone") else store

    def _answer(self, question: Callable[[], Any]) -> Any:
        found: list[Any] = []

        def ask() -> None:
            with suppress(Exception):
                found.append(question())

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(_STORE_S)
        if not found:
            raise _NoStore
        return found[0]

    def tell(self) -> None:
        """This rank has failed. It is in the store when this returns."""
        self._say("failed")

    def leave(self) -> None:
        """This rank has seen what it searched for."""
        self._say("left")

    def failed(self) -> set[int]:
        """Who has told."""
        return self._read("failed", self.ranks)

    def left(self) -> set[int]:
        return self._read("left", self.gone)

    def _say(self, what: str) -> None:
        count = f"{self.group.key}{what}"

        def say() -> bool:
            slot = f"{count}/{self.inner.add(count, 1)}"
            self.inner.set(slot, str(self.group.rank))
            return bool(self.inner.check([slot]))

        self._answer(say)

    def _read(self, what: str, ranks: set[int]) -> set[int]:
        count = f"{self.group.key}{what}"

        def look() -> bool:
            while self.read[what] < self.inner.add(count, 0) and self.inner.check([f"{count}/{self.read[what] + 1}"]):
                self.read[what] += 1
                ranks.add(int(self.inner.get(f"{count}/{self.read[what]}")))
            return True

        self._answer(look)
        return ranks

    def where(self, rank: int) -> list[str] | None:
        key = f"{self.group.key}{rank}"
        found = self._answer(lambda: self.inner.get(key).decode().split() if self.inner.check([key]) else [])
        return found or None


# --- ports ---------------------------------------------------------------------------------------------


def _port() -> int:
    """Of a socket on which this process listens, to nobody, until it ends."""
    global _listener
    if _listener is None:
        _listener = socket.create_server(("", 0), backlog=4096)
        os.register_at_fork(after_in_child=_close)  # a child that lives longer is not this process
    return int(_listener.getsockname()[1])


def _close() -> None:
    global _listener, _group
    if _listener is not None:
        _listener.close()
    _listener = _group = None


def _host() -> str:
    """Equal for processes that reach each other at 127.0.0.1."""
    with suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}:{os.readlink('/proc/self/ns/net')}"
    return socket.gethostname()


def _address(store: Any) -> str:
    """At which others reach this host: where it looks for the store from. Nothing is sent."""
    server = _server(store)
    with suppress(Exception), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect(server or ("127.0.0.1", 1))
        return str(s.getsockname()[0])
    return "127.0.0.1"


def _server(store: Any) -> tuple[str, int] | None:
    """Of a TCPStore."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, dist.TCPStore) else None


class _Door:
    """A connection to a rank's port, which its kernel closes when the process ends."""

    def __init__(self, group: _Group, where: list[str] | None) -> None:
        self.socket: socket.socket | None = None
        self.there: bool | None = None
        if where is None:
            return
        host, address, port = where
        same = host == group.host
        if not same and address.startswith("127."):
            return
        try:
            self.socket = socket.create_connection(("127.0.0.1" if same else address, int(port)), timeout=1)
            self.socket.setblocking(False)
            self.there = True
        except ConnectionRefusedError:
            self.there = False
        except OSError:
            pass

    def open(self) -> bool | None:
        """Is the process there? None: that cannot be told."""
        if self.there and self.socket is not None:
            try:
                self.there = bool(self.socket.recv(1))
            except BlockingIOError:
                pass
            except OSError:
                self.there = False
        return self.there
