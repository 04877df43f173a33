"""The files users deploy with are checked offline, as the cluster and the server would check them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from deployments.cluster.placement import bundles
from deployments.local import yaml_config
from deployments.settings import AppSettings
from engine.errors import ConfigError
from paceline.cli import parser
from paceline.serve import overridden

ROOT = Path(__file__).parents[3]
DEPLOYMENTS = sorted((ROOT / "deployments").glob("*.yaml"))


def test_the_cluster_file_passes_ray_s_own_validation() -> None:
    config = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    validate_config(prepare_config(config))
    assert config["available_node_types"]["head"]["resources"].get("GPU", 0) == 0
    assert "RAY_AUTH_MODE=token" in " ".join(config["head_start_ray_commands"] + config["worker_start_ray_commands"])
    assert "--dashboard-host=127.0.0.1" in " ".join(config["head_start_ray_commands"])


@pytest.mark.parametrize("path", DEPLOYMENTS, ids=lambda path: path.name)
def test_deployment_files_are_valid_and_listen_on_loopback(path: Path) -> None:
    assert yaml_config.http_address(yaml_config.load(path))[0] == "127.0.0.1"


def test_the_70b_target_takes_four_gpus_with_the_draft_on_the_first() -> None:
    (settings,) = yaml_config.check(yaml_config.load(ROOT / "deployments" / "llama3-70b.yaml"))
    assert bundles(settings) == [{"CPU": 1.0}] + [{"CPU": 1.0, "GPU": 1.0}] * 4


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"engine": {"model": "m", "no_such": 1}}, "engine.no_such"),
        ({"engine": {"model": "m", "block_size": 0}}, "engine.block_size"),
        ({"engine": {"model": "m", "speculative": {"method": "draft_model"}}}, "draft"),
        ({"engine": {"model": "m", "speculative": {"method": "ngram", "k": 99}}}, "engine.speculative.k"),
        ({"engine": {"model": "m", "speculative": {"ngram_min": 5, "ngram_max": 2}}}, "ngram_min"),
        ({"engine": {}}, "engine.model"),
        ({"engine": {"model": "m"}, "replicas": 3}, "replicas"),
    ],
)
def test_a_bad_setting_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named.replace(".", r"\.")):
        AppSettings.parse(change)


@pytest.mark.parametrize(
    ("options", "method", "draft"),
    [
        ([], "draft_model", "smollm2-eagle"),
        (["--model", "smollm2", "--k", "3"], "draft_model", "smollm2-eagle"),
        (["--draft", "none"], "none", None),
        (["--draft", "ngram"], "ngram", None),
        (["--draft", "some/folder"], "draft_model", "some/folder"),
        (["--model", "other/model"], "ngram", None),
        (["--model", "other/model", "--draft", "its/draft"], "draft_model", "its/draft"),
    ],
)
def test_the_default_model_takes_the_draft_that_ships_and_no_other_does(
    options: list[str], method: str, draft: str | None
) -> None:
    args = yaml_config.load(yaml_config.DEFAULT_FILE)["applications"][0]["args"]
    settings = AppSettings.parse(overridden(args, parser().parse_args(["serve", *options])))
    assert (settings.engine.speculative.method, settings.engine.speculative.draft) == (method, draft)


@pytest.mark.parametrize(
    "text", ["", "[]", "applications: []", "applications:\n  - import_path: a:b\n", "{", "a: \x00"]
)
def test_a_broken_file_is_a_clear_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "deployment.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"deployment\.yaml"):
        yaml_config.load(path)
