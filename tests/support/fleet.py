"""Two Ray nodes on this machine with one replica each, and the load that one entry node gives them. Run as a program.

Prints one JSON object: requests by node with Serve's own router and with ours, and the nodes that one session met. The
replica is a few lines that sleep, because the subject is routing; it runs behind the real proxy with the real router.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from typing import Any

import httpx
import ray
from fastapi import FastAPI
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.config import HTTPOptions, RequestRouterConfig

from deployments.fleet.request_router import ROUTER_PATH

NUM_REQUESTS = 60
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


def main(port: int) -> dict[str, Any]:
    """Both routers in turn on one cluster."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
    cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, log_to_driver=False)
    url = f"http://127.0.0.1:{port}/"
    serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port, location="HeadOnly"))
    found: dict[str, Any] = {}
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
    ray.shutdown()
    cluster.shutdown()
    return found


if __name__ == "__main__":
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    print(json.dumps(main(int(sys.argv[1]))))
