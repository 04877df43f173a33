"""Kubernetes manifests for the answers given: settings, image, GPUs and replicas agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.local.init_files import MANIFESTS, manifests, write_all
from deployments.settings import AppSettings
from engine.errors import ConfigError
from paceline.cli import main


def service(contents: dict[str, str]) -> tuple[dict[str, Any], AppSettings, dict[str, Any]]:
    """The cluster, the settings of the application, and the group of workers."""
    spec = yaml.safe_load(contents["rayservice.yaml"])["spec"]
    (application,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    (workers,) = spec["rayClusterConfig"]["workerGroupSpecs"]
    return spec["rayClusterConfig"], AppSettings.parse(application["args"]), workers


def test_without_answers_the_manifests_are_the_shipped_ones() -> None:
    contents = manifests(lambda args: args, image=None)
    assert set(contents) == {path.name for path in MANIFESTS.glob("*.yaml")}
    for name, text in contents.items():
        assert yaml.safe_load(text) == yaml.safe_load((MANIFESTS / name).read_text()) or name == "rayservice.yaml"
    shipped = yaml.safe_load((MANIFESTS / "rayservice.yaml").read_text())
    made = yaml.safe_load(contents["rayservice.yaml"])
    assert made["spec"]["rayClusterConfig"] == shipped["spec"]["rayClusterConfig"]
    assert yaml.safe_load(made["spec"]["serveConfigV2"]) == yaml.safe_load(shipped["spec"]["serveConfigV2"])
    assert "serveConfigV2: |" in contents["rayservice.yaml"], "a person edits this block"


def test_gpus_image_and_replicas_follow_the_answers(tmp_path: Path) -> None:
    options = [
        "--model",
        "org/model",
        "--device",
        "cuda",
        "--tp",
        "4",
        "--replicas",
        "12",
        "--image",
        "registry/image:1",
    ]
    assert main(["init", str(tmp_path), "--kubernetes", *options]) == 0
    cluster, settings, workers = service({path.name: path.read_text() for path in tmp_path.iterdir()})
    assert (settings.engine.model, settings.engine.device, settings.num_replicas) == ("org/model", "cuda", 12)
    assert settings.api_keys_file == "/etc/paceline/keys.yaml"
    assert (workers["replicas"], workers["minReplicas"], workers["maxReplicas"]) == (12, 12, 12)
    (container,) = workers["template"]["spec"]["containers"]
    assert (
        container["resources"]["limits"]["nvidia.com/gpu"] == container["resources"]["requests"]["nvidia.com/gpu"] == 4
    )
    assert container["image"] == "registry/image:1"
    assert cluster["headGroupSpec"]["template"]["spec"]["containers"][0]["image"] == "registry/image:1"
    assert "nvidia.com/gpu" not in cluster["headGroupSpec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    (shm,) = [volume for volume in workers["template"]["spec"]["volumes"] if volume["name"] == "shm"]
    assert shm["emptyDir"]["sizeLimit"] == "16Gi"


def test_autoscaling_bounds_the_workers() -> None:
    def scaled(args: dict[str, Any]) -> dict[str, Any]:
        rest = {key: value for key, value in args.items() if key != "num_replicas"}
        return rest | {"autoscaling": {"min_replicas": 1, "max_replicas": 20}}

    _, _, workers = service(manifests(scaled, image=None))
    assert (workers["replicas"], workers["minReplicas"], workers["maxReplicas"]) == (1, 1, 20)


def test_a_device_must_be_chosen_and_settings_are_checked() -> None:
    def changed(**engine: Any) -> Any:
        return lambda args: args | {"engine": args["engine"] | engine}

    with pytest.raises(ConfigError, match="--device: auto given; manifests need cpu or cuda"):
        manifests(changed(device="auto"), image=None)
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        manifests(changed(tensor_parallel_size=0), image=None)


def test_existing_files_are_kept(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")
    assert list(write_all(tmp_path, {"a": "new", "b": "new"})) == [(tmp_path / "a", False), (tmp_path / "b", True)]
    assert (tmp_path / "a").read_text() == "mine"
