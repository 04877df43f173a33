"""Two Ray nodes on this machine with one replica each, and the load that one entry node gives them. Run as a program.

Prints one JSON object: requests by node with Serve's own router and with ours, the nodes that one session met, what
device `auto` means there by number of shards, and the metrics targets before and after a node is lost. The replica is a
few lines that sleep, because the subject is routing; it runs behind the real proxy with the real router. The GPUs of
the second node exist for Ray only.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter
from typing import Any

import httpx
import ray
from fastapi import FastAPI
from ray import serve
from ray._raylet import GCS_AUTOSCALER_CLUSTER_CONFIG_KEY, GCS_AUTOSCALER_STATE_NAMESPACE
from ray.cluster_utils import Cluster
from ray.core.generated.autoscaler_pb2 import ClusterConfig, NodeGroupConfig
from ray.serve.config import HTTPOptions, RequestRouterConfig

from autoscale.control.metric_targets import MetricTarget
from deployments.app import with_device
from deployments.cluster.controller_handle import start_controller
from deployments.fleet.request_router import ROUTER_PATH
from deployments.local.ports import free_port
from deployments.settings import AppSettings
from engine.core.pacing import SpeculationPlan

NUM_REQUESTS = 60
HEAD = "head"
"""A resource that only the first node has."""
HOLD_S = 0.2

api = FastAPI()


@serve.deployment(num_replicas=2, max_ongoing_requests=100_000, ray_actor_options={"num_cpus": 2})
@serve.ingress(api)
class Sleeper:
    """Answers with the node it is on."""

    @api.get("/")
    async def node(self) -> str:
        await asyncio.sleep(HOLD_S)
        return str(ray.get_runtime_context().get_node_id())


async def ask(url: str, num: int, **headers: str) -> Counter[str]:
    """So many requests at once."""
    limits = httpx.Limits(max_connections=num)
    async with httpx.AsyncClient(limits=limits, timeout=60) as client:
        responses = await asyncio.gather(*(client.get(url, headers=headers) for _ in range(num)))
    return Counter(response.json() for response in responses)


def devices() -> dict[str, str]:
    """Device `auto` for one, two and four shards, and for four once an autoscaler has nodes with four GPUs."""

    def device(num_shards: int) -> str:
        engine = {"model": "m", "tensor_parallel_size": num_shards}
        return with_device(AppSettings.parse({"engine": engine})).engine.device

    found = {str(num_shards): device(num_shards) for num_shards in (1, 2, 4)}
    group = NodeGroupConfig(name="large", resources={"GPU": 4}, max_count=1)
    ray._private.worker.global_worker.gcs_client.internal_kv_put(
        GCS_AUTOSCALER_CLUSTER_CONFIG_KEY.encode(),
        ClusterConfig(node_group_configs=[group]).SerializeToString(),
        True,
        GCS_AUTOSCALER_STATE_NAMESPACE.encode(),
    )
    return found | {"4 on demand": device(4)}


def targets_of(nodes: dict[str, str]) -> list[str]:
    """Nodes by name whose replica's metrics target is listed. Each of `nodes`, name to id, has announced one."""
    controller = start_controller("fleet", SpeculationPlan(), {"num_cpus": 0, "resources": {HEAD: 0.01}})
    for name, node_id in nodes.items():
        target = MetricTarget(address=f"{name}:9400", labels={"replica": name}, node_id=node_id)
        ray.get(controller.announce.remote(target), timeout=60)
    return [target.labels["replica"] for target in ray.get(controller.targets.remote(), timeout=60)]


def main(port: int) -> dict[str, Any]:
    """Both routers in turn on one cluster."""
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 3,
            "include_dashboard": False,
            "dashboard_port": free_port(),
            "resources": {HEAD: 1},
        },
    )
    second = cluster.add_node(num_cpus=2, num_gpus=2)
    ray.init(address=cluster.address, log_to_driver=False)
    url = f"http://127.0.0.1:{port}/"
    serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port, location="HeadOnly"))
    found: dict[str, Any] = {"devices": devices()}
    for name, options in (
        ("serve", {}),
        ("load", {"request_router_config": RequestRouterConfig(request_router_class=ROUTER_PATH)}),
    ):
        serve.run(Sleeper.options(**options).bind(), name=f"fleet-{name}", route_prefix="/")
        asyncio.run(ask(url, 4))  # the proxy has met both replicas
        found[name] = sorted(asyncio.run(ask(url, NUM_REQUESTS)).values())
        if name == "load":
            sessions = [asyncio.run(ask(url, 1, **{"x-session-id": "chat"})) for _ in range(6)]
            found["nodes_of_a_session"] = len(set().union(*sessions))
        serve.delete(f"fleet-{name}")
    serve.shutdown()
    nodes = {"first": cluster.head_node.node_id, "second": second.node_id}
    found["targets"] = targets_of(nodes)
    cluster.remove_node(second, allow_graceful=False)
    deadline = time.monotonic() + 60
    while not [node for node in ray.nodes() if not node["Alive"]] and time.monotonic() < deadline:
        time.sleep(0.2)
    found["targets_after_node_death"] = targets_of(nodes)
    ray.shutdown()
    cluster.shutdown()
    return found


if __name__ == "__main__":
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    print(json.dumps(main(int(sys.argv[1]))))
