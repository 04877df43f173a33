"""The project and a deployment file as one zip, for a Ray cluster whose nodes do not have Paceline installed.

Owns what the zip holds and the deployment file that names it. The name of the zip has a hash of its content, because
Ray downloads an address only once. Does not upload anything.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deployments.local import yaml_config
from engine.errors import ConfigError

PROJECT = Path(__file__).parents[2]
"""The folder that holds the packages: a checkout, or site-packages."""
PACKAGES = ("autoscale", "deployments", "engine")
"""Packages that a deployment imports."""
TOP = "paceline"
"""The folder within the zip. Ray wants a single one and removes it."""
_DATE = (1980, 1, 1, 0, 0, 0)  # the same content has the same hash


@dataclass(frozen=True, slots=True)
class Bundle:
    """What `write_bundle` has written."""

    archive: Path
    """The zip."""
    deployment: Path
    """The deployment file for `serve deploy`."""
    address: str
    """Where the deployment file expects the zip."""


def write_bundle(config: Path, folder: Path, *, url: str | None, with_requirements: bool) -> Bundle:
    """Write the zip and a deployment file into a folder, which is made where there is none.

    Args:
        config: deployment file.
        folder: for both.
        url: address of a folder that all nodes reach and that the zip is copied to: https, s3, gs or file. None stands
            for `folder`, which then every node must see under the same path.
        with_requirements: let Ray install Paceline's requirements on each node as well.

    Raises:
        ConfigError: the deployment file is wrong, or the folder cannot be written.
    """
    values = yaml_config.load(config)
    content = _archive(config)
    name = f"paceline-{hashlib.sha256(content).hexdigest()[:12]}.zip"
    address = f"{url.rstrip('/') if url is not None else folder.resolve().as_uri()}/{name}"
    if not address.startswith(("https://", "http://", "s3://", "gs://", "file://")):
        raise ConfigError(
            f"--url: {url!r} given; allowed are addresses with https, s3, gs or file, such as s3://bucket"
        )
    runtime_env: dict[str, Any] = {"working_dir": address}
    if with_requirements:
        runtime_env["pip"] = requirements()
    for app in values["applications"]:
        if app.get("import_path") == yaml_config.IMPORT_PATH:
            app["runtime_env"] = (app.get("runtime_env") or {}) | runtime_env
    made = Bundle(folder / name, folder / config.name, address)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if made.deployment.exists() and made.deployment.samefile(config):
            raise ConfigError(f"{folder}: holds {config.name} itself; give another folder")
        made.archive.write_bytes(content)
        made.deployment.write_text(yaml.safe_dump(values, sort_keys=False))
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror or error}") from None
    return made


def requirements() -> list[str]:
    """What Paceline needs on a node, without the extras."""
    return [line for line in importlib.metadata.requires("paceline") or () if "extra ==" not in line]


def _archive(config: Path) -> bytes:
    version = importlib.metadata.version("paceline")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:

        def add(name: str, content: bytes) -> None:
            archive.writestr(zipfile.ZipInfo(f"{TOP}/{name}", _DATE), content, zipfile.ZIP_DEFLATED)

        for path in _files():
            add(path.relative_to(PROJECT).as_posix(), path.read_bytes())
        add(config.name, config.read_bytes())
        # The server asks for the version of the installed distribution.
        add(
            f"paceline-{version}.dist-info/METADATA",
            f"Metadata-Version: 2.1\nName: paceline\nVersion: {version}\n".encode(),
        )
    return buffer.getvalue()


def _files() -> Iterator[Path]:
    for package in PACKAGES:
        for path in sorted((PROJECT / package).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path
