"""Builds the Serve application that `import_path: deployments.app:build` names in a YAML file.

Owns the mapping from settings to deployment options. Runs once per `serve deploy`, on the cluster. `serve run` takes
`deployments.app:build` too; `serve build` takes `deployments.app:app`, the application of the embedded model.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

import ray
import ray._private.state
import yaml
from ray import cloudpickle, serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from autoscale.replicas import decision
from deployments.cluster import placement
from deployments.cluster.placement import bundles, choose_device
from deployments.fleet.request_router import ROUTER_PATH
from deployments.fleet.serve_autoscaling import POLICY_PATH
from deployments.local.yaml_config import DEFAULT_FILE
from deployments.replica import Replica
from deployments.settings import AppSettings
from engine.config import EngineConfig

POLICY_MODULES = (decision, placement)
"""Modules of this project that the autoscaling policy uses when it runs."""
HEALTH_PERIOD_S = 5.0
MAX_ONGOING_REQUESTS = 100_000
"""Serve never queues or refuses a request, because `http.admission` does (429 with Retry-After)."""
_log = logging.getLogger("ray.serve")


def build(args: dict[str, Any]) -> Application:
    """The application for the `args:` of a YAML file; for empty args that of the embedded model.

    Raises:
        ConfigError: a setting is wrong; the message names it.
    """
    settings = with_device(AppSettings.parse(args or default_args()))
    with policy_by_value():
        deployment = serve.deployment(serve.ingress()(Replica)).options(
            name="Replica",
            **_replicas(settings),
            **_router(),
            max_ongoing_requests=MAX_ONGOING_REQUESTS,
            health_check_period_s=HEALTH_PERIOD_S,
            health_check_timeout_s=3 * HEALTH_PERIOD_S,
            graceful_shutdown_timeout_s=settings.drain_timeout_s,
            ray_actor_options={"num_cpus": 1},
            placement_group_bundles=bundles(settings),
            placement_group_strategy="STRICT_PACK",
        )
    return deployment.bind(settings.model_dump())


def __getattr__(name: str) -> Any:
    """Builds `app` on its first use, because Ray may start only after this module is imported."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return build({})


def default_args() -> dict[str, Any]:
    """The `args:` of smollm2.yaml."""
    args: dict[str, Any] = yaml.safe_load(DEFAULT_FILE.read_text())["applications"][0]["args"]
    return args


def _replicas(settings: AppSettings) -> dict[str, Any]:
    """Serve's deployment options for the number of replicas."""
    chosen = settings.autoscaling
    if chosen is None:
        return {"num_replicas": settings.num_replicas}
    config = {
        "min_replicas": chosen.min_replicas,
        "max_replicas": chosen.max_replicas,
        "upscale_delay_s": chosen.upscale_delay_s,
        "downscale_delay_s": chosen.downscale_delay_s,
        "look_back_period_s": chosen.look_back_s,
        "policy": {"policy_function": POLICY_PATH, "policy_kwargs": {"tpot_s": chosen.tpot_s}},
    }
    return {"autoscaling_config": config}


def _router() -> dict[str, Any]:
    """Serve's deployment option for routing. HAProxy balances load by itself and refuses a router of the deployment."""
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1":
        return {}
    return {"request_router_config": RequestRouterConfig(request_router_class=ROUTER_PATH)}


@contextlib.contextmanager
def policy_by_value() -> Iterator[None]:
    """Within it, Serve pickles the autoscaling policy together with the modules of this project that it uses.

    Serve's controller runs the policy outside of the application's runtime environment. There it cannot import modules
    that exist only in a `working_dir`. Serve itself includes only the modules of the policy and of the request router.
    """
    for module in POLICY_MODULES:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in POLICY_MODULES:
            cloudpickle.unregister_pickle_by_value(module)


def with_device(settings: AppSettings) -> AppSettings:
    """The settings with device `auto` replaced, by the nodes of the whole cluster and not by the one that runs this."""
    engine = settings.engine
    if engine.device != "auto":
        return settings
    choice = choose_device(engine.tensor_parallel_size, *_gpus_of_nodes())
    _log.warning("engine.device: auto becomes %s: %s", choice.device, choice.reason)
    chosen = EngineConfig.parse(engine.model_dump() | {"device": choice.device})
    return settings.model_copy(update={"engine": chosen})


def _gpus_of_nodes() -> tuple[list[float], list[float]]:
    """GPUs of each living node, and of each kind of node that an autoscaler has said it can start."""
    if not ray.is_initialized():
        return [], []
    living = [node["Resources"].get("GPU", 0.0) for node in ray.nodes() if node["Alive"]]
    config = ray._private.state.state.get_cluster_config()
    groups = config.node_group_configs if config is not None else []
    return living, [float(group.resources.get("GPU", 0)) for group in groups if group.max_count != 0]
