"""Checkpoints from which a training goes on to the bit: weights, optimizer, random numbers, place in the data.

What a wrapper and its engine know besides the module's own state (captures, plans) changes no result and is made again
when it is needed; their random numbers come from torch's generator. So a checkpoint holds what PyTorch's objects hold.

FOLDER/step-N/       whole and on the disk: it gets this name when every rank's files are
    rank-R.pt        torch.save, loads with weights_only: the state of rank R. A tensor that has the bits of rank 0's is
                     not written again (_SAME stands for it), nor is a DTensor (_SHARD and its path)
    shards/          DTensors (FSDP2), by torch.distributed.checkpoint
FOLDER/new/, gone/   what is being written, removed; left over by a process that was killed

Invariants: save and load are called by all ranks of the default process group, which see one folder. What fails on one
rank is raised on all. A rank that does not come (it died, it hangs) is named by the error of the others. Nothing of an
older checkpoint is touched before the newer one has its name.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import pickle
import random
import re
import shutil
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from . import torch_private as private

logger = logging.getLogger("ortmodule")

_SAME, _SHARD = "ortmodule: rank 0's", "ortmodule: shard "
_KEY = "ortmodule.checkpoint/"
_LATE = 5.0  # seconds a rank may come after another to a collective that fails, and not be called gone
_Path = tuple[Any, ...]


def save(folder: str | os.PathLike[str], step: int, model: nn.Module, optimizer: torch.optim.Optimizer | None = None,
         *, keep: int = 2, **others: Any) -> Path:  # fmt: skip
    """Writes the training's state as FOLDER/step-N, aside first; the name comes when all is on the disk.

    folder: seen by all ranks. step: how many steps are done. model: also DistributedDataParallel, or sharded by
    fully_shard. others: what else has state_dict() and load_state_dict(): schedules, a GradScaler, samplers, loaders;
    each rank's own. Saved too: the random numbers of torch, random and numpy of each rank. keep: how many checkpoints
    remain; older ones are removed.
    -> the checkpoint. Raises on every rank what has failed on one: RuntimeError, naming the rank.
    """
    folder, rank, n = Path(folder), *_place()
    new, whole = folder / "new", folder / f"step-{step}"
    with _together("saving", new):
        if not isinstance(step, int) or step < 1:
            raise ValueError(f"step={step!r}: a checkpoint is of one step or more; give how many are done, as a number")
        if not isinstance(keep, int) or keep < 1:
            raise ValueError(f"keep={keep!r}: so many checkpoints remain, the new one among them: give 1 or more")
        if rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            if later := [n for n, _ in _steps(folder) if n > step]:
                raise FileExistsError(
                    f"step {step} would be older than step-{later[-1]}, which is there: load it first, or begin in "
                    "another folder"
                )
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir()
    shards: dict[str, Tensor] = {}
    tree: Any = None
    with _together("saving", new):
        parts = _state(_bare(model), optimizer, others)
        tree = _mapped(parts, lambda path, value: _set_aside(path, value, shards))
        _loads(tree)
        if not new.is_dir():
            raise FileNotFoundError(
                f"{new}, which rank 0 has made, is not seen here: ranks need one folder, each training one of its own"
            )
    own = _leave_out_what_rank_0_has(tree, {k for k, _ in _bare(model).named_buffers()}) if n > 1 else []
    tree["ranks"], tree["differ"] = n, sorted({path for paths in _gathered(own) for path in paths})
    with _together("saving", new):
        with open(new / f"rank-{rank}.pt", "wb") as file:
            torch.save(tree, file)
            file.flush()
            os.fsync(file.fileno())
    if any(_gathered(bool(shards))):
        import torch.distributed.checkpoint as dcp

        with _called():
            dcp.save(shards, checkpoint_id=new / "shards", no_dist=n == 1)  # type: ignore[arg-type]  # syncs its files
    with _together("saving", whole):
        if rank == 0:
            for name in ("shards", "."):
                _sync(new / name)
            if whole.exists():
                old = folder / f"step-{step}.old"
                _remove(old, folder)  # of a process that was killed
                os.rename(whole, old)
            os.rename(new, whole)
            _sync(folder)
            for old in [p for _, p in _steps(folder)][:-keep] + [*folder.glob("step-*.old")]:
                _remove(old, folder)
    return whole


def load(folder: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None,
         **others: Any) -> int:  # fmt: skip
    """Puts the newest checkpoint of the folder into these objects; gradients that are there become None.

    The arguments are those of save; what is not given is not loaded. On as many ranks as have saved the training goes
    on to the bit; on another number weights, moments and rank 0's others are loaded, random numbers stay as they are.
    -> the steps that are done, 0 when there is no checkpoint. Raises on every rank what has failed on one.
    """
    folder, (rank, n) = Path(folder), _place()
    step, whole = 0, folder
    with _together("loading", folder):
        if found := _steps(folder):
            step, whole = found[-1]
    steps = _gathered(step)
    if len(set(steps)) > 1:
        raise RuntimeError(f"ortmodule.checkpoint: the ranks see different checkpoints in {folder}: steps {steps}")
    if not step:
        return 0
    model = _bare(model)
    wanted: dict[str, Tensor] = {}
    tree: Any = None
    with _together("loading", whole):
        tree = _read(whole, rank, n)
        for name in ("optimizer",) if optimizer is not None else ():
            if tree.get(name) is None:
                raise KeyError(f"the checkpoint has no {name}")
        if missing := others.keys() - tree["others"].keys():
            raise KeyError(f"the checkpoint has no {', '.join(sorted(missing))}")
        _tell_differences(tree, whole, optimizer, others)
        places = _Places(model, optimizer, whole)
        parts = {"model": tree["model"], **({} if optimizer is None else {"optimizer": tree["optimizer"]})}
        parts = _mapped(parts, lambda path, value: places.put(path, value, wanted))
    if any(_gathered(bool(wanted))):
        import torch.distributed.checkpoint as dcp

        with _called():
            dcp.load(wanted, checkpoint_id=whole / "shards", no_dist=n == 1)  # type: ignore[arg-type]
    with _together("loading", whole):
        model.load_state_dict(parts["model"])
        for p in model.parameters():
            p.grad = None
        if optimizer is not None:
            optimizer.load_state_dict(parts["optimizer"])
        for name, other in others.items():
            other.load_state_dict(tree["others"][name])
        if tree["ranks"] == n:
            _set_random(tree["random"])
        else:
            logger.warning("%s was saved by %d ranks and is loaded by %d: random numbers stay as they are, %s rank 0's",
                           whole, tree["ranks"], n, f"{', '.join(others) or 'other states'} are")  # fmt: skip
    return step


def _tell_differences(tree: dict[str, Any], whole: Path, optimizer: torch.optim.Optimizer | None,
                      others: dict[str, Any]) -> None:  # fmt: skip
    """What a training that goes on should know of, and may want."""
    kind, left = tree.get("kind", ""), sorted(tree["others"].keys() - others.keys())
    if optimizer is not None and kind and kind != type(optimizer).__qualname__:
        logger.warning("%s holds the state of %s, and it is loaded into %s", whole, kind, type(optimizer).__qualname__)
    if left:
        logger.warning("%s also holds %s, which was not asked for and begins anew", whole, ", ".join(left))


def weights(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The newest checkpoint's model as one plain state_dict, whole tensors, in one process and without the model; for
    load_state_dict, or for safetensors.torch.save_file (which wants tied weights once)."""
    found = _steps(Path(folder))
    if not found:
        raise FileNotFoundError(f"no checkpoint in {folder}")
    whole = found[-1][1]
    wanted: dict[str, Tensor] = {}
    places = _Places(None, None, whole)
    parts = {"model": _read(whole, 0, 0)["model"]}
    made: dict[str, Any] = _mapped(parts, lambda path, value: places.put(path, value, wanted))["model"]
    if wanted:
        import torch.distributed.checkpoint as dcp

        dcp.load(wanted, checkpoint_id=whole / "shards", no_dist=True)  # type: ignore[arg-type]
    return made


# --- the state of a training ---------------------------------------------------------------------------


def _bare(model: nn.Module) -> nn.Module:
    """Without DistributedDataParallel, so that names are the model's."""
    bare = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    if any(c.__name__ == "FullyShardedDataParallel" for m in bare.modules() for c in type(m).__mro__):
        raise TypeError("ortmodule.checkpoint: FSDP1 keeps parts of flattened parameters, which have no names: use "
                        "fully_shard (FSDP2), or FSDP1's own state_dict with torch.distributed.checkpoint")  # fmt: skip
    return bare


def _state(model: nn.Module, optimizer: torch.optim.Optimizer | None, others: dict[str, Any]) -> dict[str, Any]:
    if type(optimizer).__module__.startswith("deepspeed."):
        raise TypeError("DeepSpeed's engine saves its own state: engine.save_checkpoint(folder)")
    return {
        "model": dict(model.state_dict()),
        "optimizer": None if optimizer is None else optimizer.state_dict(),
        "kind": type(optimizer).__qualname__,
        "others": {name: other.state_dict() for name, other in others.items()},
        "random": _random(),
    }


def _random() -> dict[str, Any]:
    made: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        made["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        made["numpy"] = [str(kind), keys.tolist(), int(rest[0]), int(rest[1]), float(rest[2])]
    return made


def _set_random(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    if "numpy" in state:
        import numpy as np

        np.random.set_state(tuple(state["numpy"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    torch.set_rng_state(state["torch"])


# --- trees of dicts, lists and tuples ------------------------------------------------------------------


def _mapped(tree: Any, leaf: Callable[[_Path, Any], Any], path: _Path = ()) -> Any:
    """The same tree with leaf(path, value) for everything that is no container."""
    if isinstance(tree, dict):
        return {k: _mapped(v, leaf, (*path, k)) for k, v in tree.items()}
    if isinstance(tree, (list, tuple)):
        made = [_mapped(v, leaf, (*path, i)) for i, v in enumerate(tree)]
        return type(tree)(made) if type(tree) in (list, tuple) else made
    return leaf(path, tree)


def _sharded(value: Any) -> bool:
    return isinstance(value, Tensor) and type(value).__name__ == "DTensor"


def _set_aside(path: _Path, value: Any, shards: dict[str, Tensor]) -> Any:
    """A DTensor goes to shards, for torch.distributed.checkpoint; anything else stays."""
    if isinstance(value, nn.Parameter):
        value = value.detach()
    if not _sharded(value):
        return value
    shards["/".join(map(str, path))] = value
    return _SHARD + "/".join(map(str, path))


def _loads(tree: Any) -> None:
    """Raises TypeError when this would not be read back: better now than after a crash."""
    file = io.BytesIO()
    try:
        torch.save(_mapped(tree, lambda _, value: 0 if isinstance(value, Tensor) else value), file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:
        raise TypeError("a state_dict holds what torch.load(weights_only=True) does not read: "
                        f"{str(error).partition(chr(10))[0]}") from error  # fmt: skip


def _leave_out_what_rank_0_has(tree: dict[str, Any], buffers: set[str]) -> list[str]:
    """Puts _SAME in the place of tensors with the bits of rank 0's. -> paths of the other tensors of model and
    optimizer, but for buffers (rank 0's count: DDP hands them out)."""
    rank = _place()[0]
    found: dict[_Path, Any] = {}
    _mapped(tree, lambda path, value: found.update({path: _digest(value)}) if isinstance(value, Tensor) else None)
    given = [found if rank == 0 else None]
    with _called():
        dist.broadcast_object_list(given)
    if rank == 0:
        return []
    same = {path for path, digest in found.items() if (given[0] or {}).get(path) == digest and path[0] != "random"}
    tree.update(_mapped(tree, lambda path, value: _SAME if path in same else value))
    other = [p for p in found if p not in same and (p[0] == "optimizer" or p[0] == "model" and p[1] not in buffers)]
    return ["/".join(map(str, path)) for path in other]


def _digest(t: Tensor) -> tuple[Any, ...]:
    flat = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return t.dtype, tuple(t.shape), hashlib.blake2b(flat.numpy().tobytes(), digest_size=16).digest()


class _Places:
    """Where tensors of a checkpoint go: into DTensors where the model, or the optimizer's parameter, is one."""

    def __init__(self, model: nn.Module | None, optimizer: torch.optim.Optimizer | None, whole: Path) -> None:
        self.own = {} if model is None else model.state_dict()
        self.params = [] if optimizer is None else [p for g in optimizer.param_groups for p in g["params"]]
        self.kinds: dict[str, Any] = {}
        if (whole / "shards").exists():
            from torch.distributed.checkpoint import FileSystemReader

            self.kinds = FileSystemReader(whole / "shards").read_metadata().state_dict_metadata

    def put(self, path: _Path, value: Any, wanted: dict[str, Tensor]) -> Any:
        """What stands at this path. A shard is an entry of wanted, to be filled."""
        shard = value.removeprefix(_SHARD) if isinstance(value, str) and value.startswith(_SHARD) else None
        if shard is None and not isinstance(value, Tensor):
            return value
        like = self._like(path)
        size = value.shape if shard is None else torch.Size(self.kinds[shard].size)
        into = like if _sharded(like) and like.shape == size else None
        if shard is not None and into is None and _sharded(like):
            raise ValueError(f"{shard} has sizes {tuple(size)}, its parameter {tuple(like.shape)}: how is it sharded?")
        if shard is not None:
            dtype = self.kinds[shard].properties.dtype
            if into is None:
                empty = torch.empty(size, dtype=dtype, device="cpu")
            else:
                empty = torch.zeros_like(into, dtype=dtype)
            wanted[shard] = empty.detach()
            return wanted[shard]
        if into is None:
            return value
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(value, into.device_mesh, into.placements)  # type: ignore[attr-defined]

    def _like(self, path: _Path) -> Any:
        if path[0] == "model":
            return self.own.get(path[1])
        index = next((k for k in path[1:] if isinstance(k, int)), -1)  # state, masters: by number of the parameter
        return self.params[index] if path[1] != "param_groups" and 0 <= index < len(self.params) else None


def _read(whole: Path, rank: int, n: int) -> dict[str, Any]:
    """The state of this rank; of rank 0 where another number of ranks has saved."""
    first = _file(whole / "rank-0.pt")
    if n != first["ranks"]:
        if differ := first["differ"]:
            raise ValueError(f"the {first['ranks']} ranks that have saved differ in {', '.join(differ[:3])} "
                             f"({len(differ)} tensors), so only as many can go on")  # fmt: skip
        return first
    if rank == 0:
        return first
    own = _file(whole / f"rank-{rank}.pt")

    def mine(path: _Path, value: Any) -> Any:
        if not (isinstance(value, str) and value == _SAME):
            return value
        at: Any = first
        for k in path:
            at = at[k]
        return at

    return _mapped(own, mine)  # type: ignore[no-any-return]


def _file(path: Path) -> dict[str, Any]:
    """What torch.save has written there, if every byte of it is as it was (the archive has sums of them)."""
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
        if bad is None:
            return torch.load(path, weights_only=True)  # type: ignore[no-any-return]
    except FileNotFoundError:
        raise
    except Exception as error:
        raise _broken(path, f"is cut or broken ({type(error).__name__}: {error})") from error
    raise _broken(path, f"has other bytes than were written, in {bad}")


def _broken(path: Path, what: str) -> ValueError:
    older = [f"step-{step}" for step, p in _steps(path.parent.parent) if p != path.parent]
    remedy = f"remove {path.parent} to go on from {older[-1]}" if older else "there is no older checkpoint beside it"
    return ValueError(f"{path.name} {what}; {remedy}")


# --- folders and ranks ---------------------------------------------------------------------------------


def _steps(folder: Path) -> list[tuple[int, Path]]:
    """(step, checkpoint) of what is whole, oldest first. A step saved again is .old between two renames."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file, not the folder of checkpoints")
    names = [(m, p) for p in folder.glob("step-*") if (m := re.fullmatch(r"step-(\d+)(\.old)?", p.name))]
    return [(int(m[1]), p) for m, p in sorted(names, key=lambda pair: (int(pair[0][1]), not pair[0][2]))]


def _remove(old: Path, folder: Path) -> None:
    """At no moment is there half a checkpoint under the name of a whole one."""
    gone = folder / "gone"
    shutil.rmtree(gone, ignore_errors=True)
    if old.exists():
        os.rename(old, gone)
        shutil.rmtree(gone, ignore_errors=True)


def _sync(folder: Path) -> None:
    """The names in a folder are on the disk."""
    if folder.is_dir():
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def _place() -> tuple[int, int]:
    """(this rank, number of ranks)"""
    on = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if on else (0, 1)


def _gathered(value: Any) -> list[Any]:
    """Of every rank.

    gloo's threads let go of a collective's tensors a moment after it has ended. Such a thread needs Python for it, and
    ends the process by SIGABRT when Python is ending: a script whose last line is save. So this waits for them, which
    dist.all_gather_object does not do.
    """
    n = _place()[1]
    every = [value] * n
    if n == 1:
        return every
    with _called():
        if "cpu:" not in dist.get_backend_config():
            dist.all_gather_object(every, value)
            return every
        own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [torch.empty(1, dtype=torch.int64, device="cpu") for _ in every]
        _all_gather(sizes, torch.tensor([own.numel()], device="cpu"))
        own = nn.functional.pad(own, (0, int(max(sizes)) - own.numel()))
        rows = [torch.empty_like(own) for _ in every]
        _all_gather(rows, own)
        every = [pickle.loads(row[: int(m)].numpy().tobytes()) for row, m in zip(rows, sizes, strict=True)]
    return every


def _all_gather(rows: list[Tensor], own: Tensor) -> None:
    """dist.all_gather; at its end no other thread holds these tensors (it gives up after 5 s)."""
    tensors = [*rows, own]
    before = [sys.getrefcount(t) for t in tensors]
    dist.all_gather(rows, own)
    end = time.monotonic() + 5
    while [sys.getrefcount(t) for t in tensors] != before and time.monotonic() < end:
        time.sleep(1e-4)  # without Python's lock, which the thread may wait for


@contextmanager
def _called() -> Iterator[None]:
    """Around a collective. Every rank that enters is counted in the process group's store, so that those that do not
    come can be named when it fails: PyTorch's error tells an address, or no more than the time-out."""
    rank, n = _place()
    if n == 1:
        yield
        return
    store, number, began = private.store(), 0, time.monotonic()
    try:
        if store is not None:
            number = store.add(_KEY + str(rank), 1)
        yield
    except Exception as error:
        reason = str(error).partition("\n")[0].strip()
        raise RuntimeError(f"ortmodule.checkpoint: {_absent(store, number, n, began + _LATE)} ({reason})") from error


def _absent(store: Any, number: int, n: int, until: float) -> str:
    """Which ranks have not come to a collective that has failed on this one, its number-th. A rank's death is noticed
    at once, while others are still on their way here: they have until then (time.monotonic) to come."""
    if store is None:
        return "a rank does not answer"
    try:
        keys = [_KEY + str(rank) for rank in range(n)]
        while True:
            absent = [r for r, key in enumerate(keys) if not store.check([key]) or int(store.get(key)) < number]
            if not absent or time.monotonic() >= until:
                break
            time.sleep(0.05)
    except Exception:
        return ("a rank does not answer, nor does the process group's store, which is rank 0's where no launcher keeps "
                "it: rank 0 has ended")  # fmt: skip
    if not absent:
        return "all ranks had come, and one of them has failed or gone since"
    return f"rank {', '.join(map(str, absent))} has not come: it died, hangs, or did not call this"


@contextmanager
def _together(doing: str, where: Path) -> Iterator[None]:
    """What fails inside on one rank is raised on all, so that none waits for it. Ends when all ranks have come."""
    failed: Exception | None = None
    try:
        yield
    except Exception as error:
        failed = error
    said = [None if e is None else f"rank {r}: {e}" for r, e in
            enumerate(_gathered(None if failed is None else f"{type(failed).__name__}: {failed}"))]  # fmt: skip
    if any(said):
        what = "; ".join(s for s in said if s)
        raise RuntimeError(f"ortmodule.checkpoint: {doing} {where} failed on {what}") from failed
