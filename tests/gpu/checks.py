"""Checks as rows of a table."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any


def rows_of(checks: Iterable[tuple[str, Callable[[], str]]], only: Sequence[str] = ()) -> list[dict[str, Any]]:
    """A check returns what it found, which begins with "ok" when all is well. only: those whose names have one of these
    texts; none: all."""
    rows = []
    for name, check in checks:
        if only and not any(text in name for text in only):
            continue
        try:
            detail = check()
        except Exception as e:  # a check that raises is a failed check; the rest still runs
            where = traceback.extract_tb(e.__traceback__)[-1]
            detail = f"{type(e).__name__}: {e} ({where.filename}:{where.lineno})"
        rows.append({"check": name, "ok": detail.startswith("ok"), "detail": detail})
        print(f"{'ok    ' if rows[-1]['ok'] else 'FAILED'} {name}: {detail}", flush=True)
    return rows
