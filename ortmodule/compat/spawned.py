"""What a spawned process unpickles before it runs the script: naming this module imports ortmodule.compat there."""

from __future__ import annotations


class Arguments(list[str]):
    """sys.argv of the script."""
