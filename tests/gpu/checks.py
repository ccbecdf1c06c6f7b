"""Checks as rows of a table."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from typing import Any


def rows_of(checks: Iterable[tuple[str, Callable[[], str]]]) -> list[dict[str, Any]]:
    """A check returns what it found, which begins with "ok" when all is well."""
    rows = []
    for name, check in checks:
        try:
            detail = check()
        except Exception as e:  # a check that raises is a failed check; the rest still runs
            where = traceback.extract_tb(e.__traceback__)[-1]
            detail = f"{type(e).__name__}: {e} ({where.filename}:{where.lineno})"
        rows.append({"check": name, "ok": detail.startswith("ok"), "detail": detail})
        print(f"{'ok    ' if rows[-1]['ok'] else 'FAILED'} {name}: {detail}", flush=True)
    return rows
