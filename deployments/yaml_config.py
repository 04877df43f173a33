"""Deployment files: read, checked offline, and made from command-line options.

Owns what a valid YAML file is: Serve's own schema, then our settings for every application that names our builder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema

from deployments.settings import AppSettings
from engine.config import describe
from engine.errors import ConfigError

IMPORT_PATH = "deployments.app:build"
DEFAULT_FILE = Path(__file__).with_name("smollm2.yaml")


def load(path: Path) -> dict[str, Any]:
    """Read a file and check it.

    Raises:
        ConfigError: naming the file, the field and what is allowed.
    """
    try:
        values = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping with `applications:`, found {type(values).__name__}")
    try:
        check(values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return values


def check(values: dict[str, Any]) -> list[AppSettings]:
    """The settings of every application of ours in a deployment file.

    Raises:
        ConfigError: Serve's schema or our settings do not accept it.
    """
    try:
        schema = ServeDeploySchema.model_validate(values)
    except ValidationError as error:
        raise ConfigError(describe(error)) from None
    ours = [app for app in schema.applications if app.import_path == IMPORT_PATH]
    if not ours:
        raise ConfigError(f"applications: none has import_path {IMPORT_PATH}")
    settings = []
    for app in ours:
        try:
            settings.append(AppSettings.parse(app.args))
        except ConfigError as error:
            raise ConfigError(f"applications[{app.name}].args.{error}") from None
    return settings


def http_address(values: dict[str, Any]) -> tuple[str, int]:
    """Host and port that Serve will listen on."""
    http = values.get("http_options") or {}
    return str(http.get("host", "0.0.0.0")), int(http.get("port", 8000))


def with_overrides(values: dict[str, Any], *, args: dict[str, Any], port: int | None) -> dict[str, Any]:
    """A copy with the only application's `args` and the port replaced."""
    changed = yaml.safe_load(yaml.safe_dump(values))
    changed["applications"][0]["args"] = args
    if port is not None:
        changed.setdefault("http_options", {})["port"] = port
    check(changed)
    result: dict[str, Any] = changed
    return result
