"""The manifests agree with each other and with the settings: names, ports, secrets, and the Serve config inside.

The schemas of the custom resources are checked by `test_crds.py`; what can be wrong besides is checked here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.local import yaml_config
from deployments.settings import AppSettings

FOLDER = Path(__file__).parents[2] / "deployments" / "kubernetes"
DOCKERFILE = FOLDER.parent / "docker" / "Dockerfile"


def load(name: str) -> dict[str, Any]:
    (document,) = yaml.safe_load_all((FOLDER / name).read_text())
    assert isinstance(document, dict)
    return document


@pytest.fixture(scope="module")
def service() -> dict[str, Any]:
    return load("rayservice.yaml")


@pytest.fixture(scope="module")
def worker(service: dict[str, Any]) -> dict[str, Any]:
    (group,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    template: dict[str, Any] = group["template"]
    return template


@pytest.fixture(scope="module")
def settings(service: dict[str, Any]) -> AppSettings:
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    assert config["http_options"]["host"] == "0.0.0.0"
    (application,) = config["applications"]
    assert application["import_path"] == yaml_config.IMPORT_PATH
    return AppSettings.parse(application["args"])


def test_the_kustomization_lists_every_manifest() -> None:
    listed = load("kustomization.yaml")["resources"]
    assert sorted(listed) == sorted({path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml"})


def test_an_open_endpoint_has_keys_from_a_secret(settings: AppSettings, worker: dict[str, Any]) -> None:
    assert settings.api_keys_file is not None
    spec = worker["spec"]
    (mount,) = [m for m in spec["containers"][0]["volumeMounts"] if settings.api_keys_file.startswith(m["mountPath"])]
    (volume,) = [v for v in spec["volumes"] if v["name"] == mount["name"]]
    assert mount["readOnly"]
    assert "secret" in volume


def test_metrics_are_scraped_where_they_listen(settings: AppSettings, worker: dict[str, Any]) -> None:
    ports = {port["name"]: port["containerPort"] for port in worker["spec"]["containers"][0]["ports"]}
    monitor = load("podmonitor.yaml")["spec"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert ports[endpoint["port"]] == settings.metrics_port
    assert endpoint["honorLabels"]
    assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": "paceline"}], "alerts select this job"
    assert settings.metrics_host == "0.0.0.0"
    assert monitor["selector"]["matchLabels"].items() <= worker["metadata"]["labels"].items()


def test_disruptions_are_bounded_and_draining_fits_into_the_grace_period(
    settings: AppSettings, worker: dict[str, Any]
) -> None:
    budget = load("poddisruptionbudget.yaml")["spec"]
    assert budget["maxUnavailable"] == 1
    assert budget["selector"]["matchLabels"].items() <= worker["metadata"]["labels"].items()
    assert worker["spec"]["terminationGracePeriodSeconds"] > settings.drain_timeout_s


def test_nothing_runs_as_root_and_rays_token_is_a_secret(service: dict[str, Any], worker: dict[str, Any]) -> None:
    assert worker["spec"]["securityContext"]["runAsNonRoot"]
    head = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]
    for template in (head, worker):
        env = {entry["name"]: entry for entry in template["spec"]["containers"][0]["env"]}
        assert env["RAY_AUTH_MODE"]["value"] == "token"
        assert "secretKeyRef" in env["RAY_AUTH_TOKEN"]["valueFrom"]


def test_the_image_is_built_from_pins_and_does_not_run_as_root() -> None:
    text = DOCKERFILE.read_text()
    stages = text.split("\nFROM ")
    for stage in ("AS cpu", "AS cuda"):
        (body,) = [part for part in stages if stage in part.splitlines()[0]]
        assert "-c /tmp/constraints.txt" in body
        assert "USER paceline" in body
    assert "VOLUME /cache" in text
