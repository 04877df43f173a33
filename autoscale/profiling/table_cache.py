"""Cost tables on disk, for the next start on the same machine.

Owns the cache files. Knows nothing of how a table is measured.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from autoscale.policy.cost_model import BATCH_KNOTS, ROW_KNOTS, CostTable

VERSION = 8
"""Version of the table's format and meaning; part of the name of the cache file."""


@dataclass(frozen=True, slots=True)
class KeptTable:
    """The content of one cache file."""

    identity: dict[str, str]
    """Everything in which two models or machines differ, the processor included."""
    table: CostTable
    """The costs of this model on this machine."""


class TableCache:
    """Cost tables on disk, one file per model, machine and settings that change the cost of a step.

    Args:
        folder: created when needed.
        identity: everything in which two models or machines differ; hashed into the file's name.
    """

    def __init__(self, folder: Path, identity: dict[str, str]) -> None:
        self._identity = identity | {"version": str(VERSION), "processor": processor()}
        name = json.dumps(self._identity, sort_keys=True)
        self._path = folder / f"{hashlib.blake2b(name.encode(), digest_size=12).hexdigest()}.json"

    def load(self) -> CostTable | None:
        """The cached table; None where there is none or it cannot be read."""
        kept = _read(self._path)
        return kept.table if kept is not None else None

    def store(self, table: CostTable) -> None:
        """Cache a table. An error of the disk is ignored: it costs the next start about a second."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, path = tempfile.mkstemp(dir=self._path.parent)
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.encode(KeptTable(self._identity, table)))
            os.replace(path, self._path)
        except OSError:
            return


def newest_table(folder: Path, fits: Callable[[dict[str, str]], bool]) -> CostTable | None:
    """The table of this machine that was stored last, among those whose identity fits; None where there is none."""
    here = {"version": str(VERSION), "processor": processor()}.items()
    found = [(path.stat().st_mtime, kept) for path in folder.glob("*.json") if (kept := _read(path)) is not None]
    fitting = [each for each in found if here <= each[1].identity.items() and fits(each[1].identity)]
    return max(fitting, key=lambda each: each[0])[1].table if fitting else None


def _read(path: Path) -> KeptTable | None:
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=KeptTable)
    except (OSError, msgspec.DecodeError):
        return None
    is_complete = len(kept.table.verify_s) == len(ROW_KNOTS) and len(kept.table.pass_s) == len(BATCH_KNOTS)
    return kept if is_complete else None


def processor() -> str:
    """Name, features and number of cores of the processor."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith(("model name", "flags")):
            name += line.partition(":")[2]
    return f"{name} x{os.cpu_count()}"
