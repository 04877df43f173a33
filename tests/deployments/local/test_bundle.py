"""What a bundle holds, and the deployment file that names it. The e2e test deploys one."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml
from ray._private.runtime_env.packaging import get_top_level_dir_from_compressed_package

from deployments.local import yaml_config
from deployments.local.bundle import PACKAGES, PROJECT, TOP, write_bundle
from engine.errors import ConfigError
from paceline.cli import main


def test_the_zip_holds_the_packages_with_their_data_and_one_folder(tmp_path: Path) -> None:
    made = write_bundle(yaml_config.DEFAULT_FILE, tmp_path / "out", url=None, with_requirements=False)
    names = set(zipfile.ZipFile(made.archive).namelist())
    for expected in (
        "deployments/app.py",
        "engine/model/native/decoder.cpp",
        "autoscale/replicas/decision.py",
        "deployments/ui/index.html",
        "deployments/models/smollm2-eagle/model.safetensors",
        "smollm2.yaml",
    ):
        assert f"{TOP}/{expected}" in names
    assert not [name for name in names if "__pycache__" in name or "/tests/" in name]
    assert get_top_level_dir_from_compressed_package(str(made.archive)) == TOP


def test_the_code_in_the_zip_imports_without_the_project(tmp_path: Path) -> None:
    made = write_bundle(yaml_config.DEFAULT_FILE, tmp_path / "out", url=None, with_requirements=False)
    zipfile.ZipFile(made.archive).extractall(tmp_path / "node")
    program = "import deployments.settings as s, importlib.metadata as m; print(s.__file__, m.version('paceline'))"
    env = os.environ | {"PYTHONPATH": str(tmp_path / "node" / TOP)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    file, version = done.stdout.split()
    assert Path(file).is_relative_to(tmp_path / "node")
    assert version == importlib.metadata.version("paceline")


def test_the_same_content_has_the_same_name_and_other_content_another(tmp_path: Path) -> None:
    first = write_bundle(yaml_config.DEFAULT_FILE, tmp_path / "a", url=None, with_requirements=False)
    again = write_bundle(yaml_config.DEFAULT_FILE, tmp_path / "b", url=None, with_requirements=False)
    assert first.archive.name == again.archive.name
    changed = tmp_path / "smollm2.yaml"
    changed.write_text(yaml_config.DEFAULT_FILE.read_text() + "\n# changed\n")
    assert write_bundle(changed, tmp_path / "c", url=None, with_requirements=False).archive.name != first.archive.name


def test_the_deployment_file_names_the_zip_and_passes_the_checks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bundle", str(tmp_path), "--url", "s3://bucket/folder/", "--pip"]) == 0
    deployment = tmp_path / "smollm2.yaml"
    printed = capsys.readouterr().out
    assert f"serve deploy {deployment}" in printed
    values = yaml_config.load(deployment)
    yaml_config.check_serve_schema(values, deployment)
    (application,) = values["applications"]
    (archive,) = tmp_path.glob("*.zip")
    assert application["runtime_env"]["working_dir"] == f"s3://bucket/folder/{archive.name}"
    assert any(line.startswith("torch==") for line in application["runtime_env"]["pip"])
    assert not any("pytest" in line for line in application["runtime_env"]["pip"])
    original = yaml.safe_load(yaml_config.DEFAULT_FILE.read_text())
    assert application["args"] == original["applications"][0]["args"]


def test_without_a_url_the_zip_is_expected_where_it_is(tmp_path: Path) -> None:
    made = write_bundle(yaml_config.DEFAULT_FILE, tmp_path, url=None, with_requirements=False)
    (application,) = yaml.safe_load(made.deployment.read_text())["applications"]
    assert application["runtime_env"] == {"working_dir": made.archive.as_uri()}


def test_what_cannot_be_bundled_is_refused(tmp_path: Path) -> None:
    for url in ("bucket/folder", "ftp://host/folder"):
        with pytest.raises(ConfigError, match=r"--url: .* allowed are addresses with https"):
            write_bundle(yaml_config.DEFAULT_FILE, tmp_path, url=url, with_requirements=False)
    own = tmp_path / "own.yaml"
    own.write_text(yaml_config.DEFAULT_FILE.read_text())
    with pytest.raises(ConfigError, match=r"holds own\.yaml itself"):
        write_bundle(own, tmp_path, url=None, with_requirements=False)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="File exists"):
        write_bundle(yaml_config.DEFAULT_FILE, tmp_path / "file", url=None, with_requirements=False)


def test_every_package_that_a_deployment_imports_is_in_it() -> None:
    """deployments may import autoscale and engine only; test_layers holds that."""
    assert set(PACKAGES) == {"deployments", "autoscale", "engine"}
    assert all((PROJECT / package / "__init__.py").is_file() for package in PACKAGES)
