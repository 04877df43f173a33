"""The files that `paceline init` writes: deployment files, or Kubernetes manifests, for the answers given.

Owns what a GPU deployment needs besides its settings: the image, GPUs and shared memory of a worker pod. Existing files
are kept. Knows no options of the command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from deployments.local.yaml_config import FOLDER
from deployments.settings import AppSettings
from engine.errors import ConfigError

MANIFESTS = FOLDER / "kubernetes"
"""Where the manifests that ship with Paceline are."""
GPU_SHARED_MEMORY = "16Gi"
"""/dev/shm of a pod with GPUs: forward inputs, draft buffers and NCCL."""
CHOICES = Callable[[dict[str, Any]], dict[str, Any]]
"""Returns the `args:` of an application with the answers in place of the file's values."""


def write_all(folder: Path, contents: dict[str, str]) -> Iterator[tuple[Path, bool]]:
    """Write files into a folder, which is made where there is none.

    Yields:
        Path of each file, and whether it was written: an existing file is kept.

    Raises:
        ConfigError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            target = folder / name
            is_new = not target.exists()
            if is_new:
                target.write_text(content)
            yield target, is_new
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}") from None


def examples() -> dict[str, str]:
    """The deployment files that ship with Paceline, by name."""
    return {path.name: path.read_text() for path in sorted(FOLDER.glob("*.yaml"))}


def manifests(chosen: CHOICES, *, image: str | None) -> dict[str, str]:
    """The Kubernetes manifests, by name.

    Args:
        chosen: changes the settings of the application.
        image: of all pods; None keeps the shipped name.

    Raises:
        ConfigError: the changed settings are wrong, or their device is auto.
    """
    contents = {path.name: path.read_text() for path in sorted(MANIFESTS.glob("*.yaml"))}
    service = yaml.safe_load(contents["rayservice.yaml"])
    serve = yaml.safe_load(service["spec"]["serveConfigV2"])
    (application,) = serve["applications"]
    application["args"] = chosen(application["args"])
    settings = AppSettings.parse(application["args"])
    if settings.engine.device == "auto":
        raise ConfigError("--device: auto given; manifests need cpu or cuda, which decides the image and the resources")
    cluster = service["spec"]["rayClusterConfig"]
    (workers,) = cluster["workerGroupSpecs"]
    if settings.engine.device == "cuda":
        image = image or "paceline:cuda"
        _use_gpus(workers["template"]["spec"], settings.engine.tensor_parallel_size)
    if settings.autoscaling is not None:
        workers |= {"replicas": settings.autoscaling.min_replicas, "minReplicas": settings.autoscaling.min_replicas}
    else:
        workers |= {"replicas": settings.num_replicas, "minReplicas": settings.num_replicas}
    workers["maxReplicas"] = max(workers["maxReplicas"], settings.most_replicas)
    for template in (cluster["headGroupSpec"]["template"], workers["template"]):
        for container in template["spec"]["containers"]:
            container["image"] = image or container["image"]
    service["spec"]["serveConfigV2"] = _Block(yaml.safe_dump(serve, sort_keys=False))
    contents["rayservice.yaml"] = yaml.dump(service, Dumper=_Dumper, sort_keys=False)
    return contents


def _use_gpus(spec: dict[str, Any], count: int) -> None:
    for resources in spec["containers"][0]["resources"].values():
        resources["nvidia.com/gpu"] = count
    for volume in spec["volumes"]:
        if volume["name"] == "shm":
            volume["emptyDir"]["sizeLimit"] = GPU_SHARED_MEMORY


class _Block(str):
    """A text that is written as a literal block."""


class _Dumper(yaml.SafeDumper):
    """Writes `_Block` as a literal block."""


_Dumper.add_representer(_Block, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|"))
