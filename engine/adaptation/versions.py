"""Adapted weights on disk: a folder per version, newest last, under a folder named after target and draft.

Owns names, checksums and the bound of their number. A version is renamed into place when it is complete; a damaged one
is refused. Knows nothing of what is in the files. Imports no torch.

    <cache>/adaptation/<hash of target and draft>/<number>-<process>/   config.json, model.safetensors, version.json
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.store import sha256_of
from engine.errors import ConfigError

KEPT = 3
"""Versions that are kept; the oldest ones are removed."""
FACTS = "version.json"
_log = logging.getLogger(__name__)


def versions_folder(cache: Path, target_folder: Path, draft_folder: Path) -> Path:
    """The folder of a draft's versions: it changes with the target's config and files, and with the draft's content."""
    digest = hashlib.sha256()
    digest.update((target_folder / "config.json").read_bytes())
    for file in sorted([*target_folder.glob("*.safetensors"), *target_folder.glob("*.gguf")]):
        digest.update(f"{file.name} {file.stat().st_size}".encode())
    for name in ("config.json", "model.safetensors"):
        digest.update(sha256_of(draft_folder / name).encode())
    return cache / "adaptation" / digest.hexdigest()[:16]


class Versions:
    """The versions of one draft. Several processes may use them at once.

    Args:
        root: from `versions_folder`.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def all(self) -> list[Path]:
        """Complete versions, oldest first."""
        return sorted(path.parent for path in self.root.glob(f"[0-9]*-[0-9]*/{FACTS}"))

    def newest(self) -> Path | None:
        """The newest version that is not damaged; None without one. Logs what it refuses."""
        for folder in reversed(self.all()):
            problem = damage(folder)
            if problem is None:
                return folder
            _log.warning("adapted draft %s is refused: %s", folder, problem)
        return None

    def add(self, write: Callable[[Path], None], facts: dict[str, Any]) -> Path:
        """Write a version and remove the oldest ones.

        Args:
            write: writes the files of the draft into a folder.
            facts: kept in `version.json`.
        """
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        number = max((int(path.name.split("-")[0]) for path in self.all()), default=0) + 1
        name = f"{number:08d}-{os.getpid()}"
        partial = self.root / f".{name}.partial"
        partial.mkdir(mode=0o700)
        try:
            write(partial)
            digests = {file.name: sha256_of(file) for file in sorted(partial.iterdir())}
            (partial / FACTS).write_text(json.dumps({**facts, "sha256": digests}, indent=1) + "\n")
            folder = partial.rename(self.root / name)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        for old in self.all()[:-KEPT]:
            self.remove(old)
        return folder

    def remove(self, folder: Path) -> None:
        """Remove a version, so that no start takes it. One that is gone is no error."""
        with contextlib.suppress(OSError):
            (folder / FACTS).unlink()  # First: without it the folder is no version.
        shutil.rmtree(folder, ignore_errors=True)


def damage(folder: Path) -> str | None:
    """What is wrong with a version; None if its files are those that were written."""
    try:
        digests = json.loads((folder / FACTS).read_text(encoding="utf-8"))["sha256"]
        for name in ("config.json", "model.safetensors"):
            if sha256_of(folder / name) != digests[name]:
                return f"{name} is damaged"
        ModelConfig.load(folder)
    except (OSError, ValueError, LookupError, TypeError, ConfigError) as error:
        return f"{type(error).__name__}: {error}"
    return None
