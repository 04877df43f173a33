"""The application builder, as a YAML file, `serve run` and `serve build` use it. No Ray runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from ray.serve import Application
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
from ray.serve._private.build_app import build_app
from ray.serve.scripts import build as serve_build

from deployments import app
from deployments.local.yaml_config import DEFAULT_FILE
from engine.errors import ConfigError

ENGINE = {"model": "smollm2", "device": "cpu"}


def test_the_settings_become_deployment_options() -> None:
    (deployment,) = build_app(app.build({"engine": ENGINE, "num_replicas": 3}), name="a").deployments
    assert deployment.name == "Replica"
    assert deployment.num_replicas == 3
    assert deployment.max_ongoing_requests == app.MAX_ONGOING_REQUESTS


def test_serve_run_without_arguments_serves_the_embedded_model() -> None:
    built = call_user_app_builder_with_args_if_necessary(app.build, {})
    assert isinstance(built, Application)
    (settings,) = build_app(built, name="a").deployments[0].init_args
    assert settings["model_name"] == yaml.safe_load(DEFAULT_FILE.read_text())["applications"][0]["args"]["model_name"]
    assert settings["engine"]["device"] == "cpu"


def test_serve_build_writes_a_deployment_file(tmp_path: Path) -> None:
    out = tmp_path / "built.yaml"
    result = CliRunner().invoke(serve_build, ["deployments.app:app", "--output-path", str(out)])
    assert result.exit_code == 0, result.output
    (application,) = yaml.safe_load(out.read_text())["applications"]
    assert application["import_path"] == "deployments.app:app"
    assert [deployment["name"] for deployment in application["deployments"]] == ["Replica"]


def test_incomplete_arguments_are_an_error_that_names_the_field() -> None:
    with pytest.raises(ConfigError, match="engine"):
        app.build({"model_name": "x"})


def test_the_module_has_no_other_lazy_attributes() -> None:
    with pytest.raises(AttributeError, match="application"):
        _ = app.application


ELSEWHERE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("deployments", "autoscale", "engine"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from types import SimpleNamespace
from ray import cloudpickle

policy = cloudpickle.loads(sys.stdin.buffer.read())(tpot_s=0.025, report=lambda app, decision: True)
context = SimpleNamespace(
    app_name="a",
    target_num_replicas=2,
    capacity_adjusted_min_replicas=1,
    capacity_adjusted_max_replicas=4,
    aggregated_metrics={},
)
print(policy(context)[0])
"""


def test_the_autoscaling_policy_runs_where_the_project_cannot_be_imported() -> None:
    """Serve's controller does not see the working_dir of an application."""
    built = app.build({"engine": ENGINE, "autoscaling": {"max_replicas": 4}})
    (deployment,) = build_app(built, name="a").deployments
    pickled = deployment._deployment_config.autoscaling_config.policy.get_serialized_policy_def()
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], input=pickled, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.split() == [b"2"]
