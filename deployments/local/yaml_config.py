"""Deployment files: read, checked offline, and made from command-line options.

Owns what a valid YAML file is: Serve's own schema, then our settings for every application that names our builder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

from deployments.http.access import is_loopback
from deployments.http.keys import KEYS_ENV, has_keys
from deployments.settings import AppSettings, LiveSettings, check_live
from engine.config import describe
from engine.errors import ConfigError

IMPORT_PATH = "deployments.app:build"
DEPLOYMENT = "Replica"
DEFAULT_FILE = Path(__file__).parents[1] / "smollm2.yaml"


def load(path: Path) -> dict[str, Any]:
    """Read a file and check it.

    Raises:
        ConfigError: naming the file, the field and what is allowed.
    """
    try:
        values = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping with `applications:`, found {type(values).__name__}")
    try:
        check(values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return values


def check(values: dict[str, Any], environ: Mapping[str, str] = os.environ) -> list[AppSettings]:
    """The settings of every application of ours in a deployment file.

    Args:
        environ: where API keys may come from.

    Raises:
        ConfigError: Serve's schema or our settings do not accept it, or it would be open to strangers.
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
        _check_live(app, settings[-1])
    _check_open(values, settings, environ)
    return settings


def _check_live(app: ServeApplicationSchema, settings: AppSettings) -> None:
    for deployment in app.deployments:
        user_config = deployment.user_config
        if deployment.name != DEPLOYMENT:
            raise ConfigError(f"applications[{app.name}].deployments: {deployment.name} given; there is {DEPLOYMENT}")
        for field, setting in (("num_replicas", "num_replicas"), ("autoscaling_config", "autoscaling")):
            if field in deployment.model_fields_set:
                raise ConfigError(
                    f"applications[{app.name}].deployments.{DEPLOYMENT}.{field}: given; use args.{setting}, "
                    "which the checks and the metrics read"
                )
        if isinstance(user_config, dict):
            try:
                check_live(LiveSettings.parse(user_config), settings)
            except ConfigError as error:
                raise ConfigError(f"applications[{app.name}].deployments.{DEPLOYMENT}.user_config.{error}") from None


def _check_open(values: dict[str, Any], settings: list[AppSettings], environ: Mapping[str, str]) -> None:
    """A server that others can reach needs keys."""
    doors = [("http_options.host", http_address(values)[0], settings)]
    doors += [("args.direct_host", app.direct_host, [app]) for app in settings if app.direct_port is not None]
    for name, host, apps in doors:
        if is_loopback(host) or all(has_keys(app, environ) for app in apps):
            continue
        raise ConfigError(
            f"{name}: {host} given, which others can reach, but there are no API keys; "
            f"set args.api_keys_file or {KEYS_ENV}, or listen on 127.0.0.1"
        )


def http_address(values: dict[str, Any]) -> tuple[str, int]:
    """Host and port that Serve will listen on."""
    http = values.get("http_options") or {}
    return str(http.get("host", "0.0.0.0")), int(http.get("port", 8000))


def past_proxy(values: dict[str, Any], *, proxy_host: str, proxy_port: int) -> dict[str, Any]:
    """A copy in which the replica of the only application listens itself where Serve's proxy would have.

    More than one replica need the proxy in front of them, and so does a route prefix: then nothing changes.

    Args:
        proxy_host, proxy_port: of the proxy, should one ever be started; none is, as nobody would ask it.
    """
    (settings,) = check(values)
    changed: dict[str, Any] = yaml.safe_load(yaml.safe_dump(values))
    (app,) = changed["applications"]
    if settings.most_replicas > 1 or settings.direct_port is not None or app.get("route_prefix", "/") != "/":
        return changed
    host, port = http_address(values)
    app["args"] |= {"direct_host": host, "direct_port": port}
    changed["http_options"] = (changed.get("http_options") or {}) | {"host": proxy_host, "port": proxy_port}
    changed["proxy_location"] = "Disabled"
    check(changed)
    return changed


def describe_upgrade(settings: AppSettings) -> str:
    """What deploying other `args` over these will do to requests, in a sentence."""
    drain = f"what runs has {settings.drain_timeout_s:g} s to finish"
    if settings.num_replicas > 1:
        return f"new args replace {settings.num_replicas} replicas one by one, {drain}, no request is dropped"
    waits = "are refused" if settings.direct_port is not None else "wait"
    return (
        f"new args replace the only replica: {drain}, new requests {waits} until it is up; user_config needs no restart"
    )


def with_user_config(values: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A copy with these live settings changed in every application of ours; see `LiveSettings`."""
    changed: dict[str, Any] = yaml.safe_load(yaml.safe_dump(values))
    for app in changed["applications"]:
        if app.get("import_path") == IMPORT_PATH:
            deployments = app.setdefault("deployments", [])
            if not deployments:
                deployments.append({"name": DEPLOYMENT})
            deployments[0]["user_config"] = (deployments[0].get("user_config") or {}) | changes
    check(changed)
    return changed


def with_overrides(
    values: dict[str, Any], *, args: dict[str, Any], host: str | None = None, port: int | None = None
) -> dict[str, Any]:
    """A copy with the only application's `args`, the host and the port replaced."""
    changed = yaml.safe_load(yaml.safe_dump(values))
    changed["applications"][0]["args"] = args
    if host is not None:
        changed.setdefault("http_options", {})["host"] = host
    if port is not None:
        changed.setdefault("http_options", {})["port"] = port
    check(changed)
    result: dict[str, Any] = changed
    return result
