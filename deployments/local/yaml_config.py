"""Deployment files: read, checked offline, and made from command-line options.

Owns what a valid YAML file is: our settings for every application that names our builder, and Serve's own schema. The
schema is checked by a function of its own, because it imports Ray: `paceline serve` leaves it to the Serve that it
starts. Returned copies share nothing with what was given.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from deployments.http.access import is_loopback
from deployments.http.keys import KEYS_ENV, has_keys
from deployments.settings import AppSettings, LiveSettings, check_live
from engine.config import describe
from engine.errors import ConfigError

IMPORT_PATH = "deployments.app:build"
DEPLOYMENT = "Replica"
FOLDER = Path(__file__).parents[1]
"""Where the deployment files that ship with Paceline are."""
DEFAULT_FILE = FOLDER / "smollm2.yaml"


def load(path: Path) -> dict[str, Any]:
    """Read a file and check it, Serve's own schema excepted.

    Raises:
        ConfigError: naming the file, the field and what is allowed.
    """
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from None
    try:
        check(values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    checked: dict[str, Any] = values
    return checked


def check(values: dict[str, Any], environ: Mapping[str, str] = os.environ) -> list[AppSettings]:
    """The settings of every application of ours in a deployment file.

    Args:
        environ: where API keys may come from.

    Raises:
        ConfigError: our settings do not accept it, or others could reach the server without keys.
    """
    ours = [app for app in _applications(values) if app.get("import_path") == IMPORT_PATH]
    if not ours:
        raise ConfigError(f"applications: none has import_path {IMPORT_PATH}")
    settings = []
    for app in ours:
        name = app.get("name", "default")
        try:
            settings.append(AppSettings.parse(app.get("args") or {}))
        except ConfigError as error:
            raise ConfigError(f"applications[{name}].args.{error}") from None
        _check_live(name, app.get("deployments") or [], settings[-1])
    _check_open(values, settings, environ)
    return settings


def check_serve_schema(values: dict[str, Any], path: Path) -> None:
    """Check a file's content against Serve's own schema. Imports Ray, which takes seconds.

    Raises:
        ConfigError: naming the file and the field.
    """
    from ray.serve.schema import ServeDeploySchema

    try:
        ServeDeploySchema.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{path}: {describe(error)}") from None


def only_application(values: dict[str, Any]) -> dict[str, Any]:
    """The application of a file that has one.

    Raises:
        ConfigError: it has several.
    """
    applications = _applications(values)
    if len(applications) != 1:
        raise ConfigError(
            f"applications: {len(applications)} given; `paceline serve` takes one, `serve deploy` on a Ray cluster more"
        )
    return applications[0]


def _applications(values: dict[str, Any]) -> list[dict[str, Any]]:
    if not isinstance(values, dict):
        raise ConfigError(f"expected a mapping with `applications:`, found {type(values).__name__}")
    applications = values.get("applications")
    if not isinstance(applications, list) or not all(isinstance(app, dict) for app in applications):
        raise ConfigError("applications: expected a list of mappings")
    return applications


def _check_live(app_name: str, deployments: Any, settings: AppSettings) -> None:
    where = f"applications[{app_name}].deployments"
    if not isinstance(deployments, list) or not all(isinstance(item, dict) for item in deployments):
        raise ConfigError(f"{where}: expected a list of mappings")
    for deployment in deployments:
        user_config = deployment.get("user_config")
        if deployment.get("name") != DEPLOYMENT:
            raise ConfigError(f"{where}: {deployment.get('name')} given; there is {DEPLOYMENT}")
        for field, setting in (("num_replicas", "num_replicas"), ("autoscaling_config", "autoscaling")):
            if field in deployment:
                raise ConfigError(
                    f"{where}.{DEPLOYMENT}.{field}: given; use args.{setting}, which the checks and the metrics read"
                )
        if isinstance(user_config, dict):
            try:
                check_live(LiveSettings.parse(user_config), settings)
            except ConfigError as error:
                raise ConfigError(f"{where}.{DEPLOYMENT}.user_config.{error}") from None


def _check_open(values: dict[str, Any], settings: list[AppSettings], environ: Mapping[str, str]) -> None:
    """A server that others can reach needs keys."""
    listeners = [("http_options.host", http_address(values)[0], settings)]
    listeners += [("args.direct_host", app.direct_host, [app]) for app in settings if app.direct_port is not None]
    for name, host, apps in listeners:
        if is_loopback(host) or all(has_keys(app, environ) for app in apps):
            continue
        raise ConfigError(
            f"{name}: {host} given, which others can reach, but there are no API keys; "
            f"set args.api_keys_file or {KEYS_ENV}, or listen on 127.0.0.1"
        )


def http_address(values: dict[str, Any]) -> tuple[str, int]:
    """Host and port that Serve will listen on.

    Raises:
        ConfigError: `http_options` is not a mapping, or its port is not a number.
    """
    options = values.get("http_options") or {}
    if not isinstance(options, dict):
        raise ConfigError(f"http_options: expected a mapping, found {type(options).__name__}")
    port = options.get("port", 8000)
    if not isinstance(port, int) or not 0 < port < 65536:
        raise ConfigError(f"http_options.port: {port!r} given; allowed are 1 to 65535")
    return str(options.get("host", "0.0.0.0")), port


def past_proxy(values: dict[str, Any], *, proxy_host: str, proxy_port: int) -> dict[str, Any]:
    """A copy in which the replica of the only application listens itself, on the address of Serve's proxy.

    Several replicas need the proxy in front of them, and so does a route prefix: then nothing changes.

    Args:
        proxy_host, proxy_port: address that is free, for the configuration of the proxy, which is not started.

    Raises:
        ConfigError: there are several applications.
    """
    (settings,) = check(values)
    changed: dict[str, Any] = yaml.safe_load(yaml.safe_dump(values))
    app = only_application(changed)
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
    drain = f"requests that run have {settings.drain_timeout_s:g} s to finish"
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
    only_application(changed)["args"] = args
    if host is not None:
        changed.setdefault("http_options", {})["host"] = host
    if port is not None:
        changed.setdefault("http_options", {})["port"] = port
    check(changed)
    result: dict[str, Any] = changed
    return result
