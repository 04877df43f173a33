"""A fleet of real replicas on the nodes of a real Ray cluster, deployed from a `paceline bundle`. Run as a program.

    engine_fleet.py life MODELS     one replica, three under load, a new model, one again
    engine_fleet.py death MODELS    three replicas, one of them on a node that is killed
    engine_fleet.py cut MODELS      two replicas, one of them on a node that stops to respond

Prints one JSON object of what was seen; the tests check it. MODELS holds the model folders `first` and `second`. The
nodes are processes of this machine, each with one CPU, so each holds one replica. Paceline cannot be imported there
except from the zip.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from fleet_clients import TIMEOUT_S, Load, burst, cached_share
from prometheus_client.parser import text_string_to_metric_families
from ray.cluster_utils import Cluster

from deployments.local.bundle import write_bundle
from deployments.local.ports import free_ports
from deployments.local.yaml_config import DEFAULT_FILE

STREAMS = 15
"""More than fit into the batches of three replicas, fewer than one replica takes."""
BATCH, WAITING = 4, 12
"""Requests that a replica computes at once, and that may wait for it."""
READINGS = 12
HEARD_S = 1.0
"""Seconds within which Serve tells its proxies that a replica takes no more requests."""


def wait_for(what: str, reached: Callable[[], bool]) -> float:
    """Seconds until it is so."""
    begin = time.monotonic()
    while True:
        with contextlib.suppress(httpx.HTTPError, KeyError):
            if reached():
                return time.monotonic() - begin
        if time.monotonic() - begin > TIMEOUT_S:
            raise TimeoutError(f"not within {TIMEOUT_S:.0f} s: {what}")
        time.sleep(0.25)


class Fleet:
    """A head with the only proxy, and nodes of one CPU each.

    Args:
        folder: for the bundle and the target files of the metrics.
        models: holds the model folders.
    """

    def __init__(self, folder: Path, models: Path, *, num_nodes: int) -> None:
        self._models = models
        self.targets = folder / "targets"
        self.targets.mkdir()
        self.values = yaml.safe_load(DEFAULT_FILE.read_text())
        dashboard, agent, port = free_ports(0, 0, 0)
        self.url = f"http://127.0.0.1:{port}"
        self._applications = f"http://127.0.0.1:{dashboard}/api/serve/applications/"
        self.values |= {"proxy_location": "HeadOnly", "http_options": {"host": "127.0.0.1", "port": port}}
        app = self.values["applications"][0]
        app["args"] = {"model_name": "tiny", "metrics_dir": str(self.targets), "drain_timeout_s": 30} | self.engine(
            "first"
        )
        self.values = yaml.safe_load(self._bundled(folder).read_text())
        os.environ |= {"PYTHONPATH": str(self._without_paceline(folder)), "RAY_TMPDIR": str(folder)}
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "include_dashboard": True,
                "dashboard_port": dashboard,
                "dashboard_agent_listen_port": agent,
            },
        )
        self.nodes = [self.cluster.add_node(num_cpus=1) for _ in range(num_nodes)]

    def engine(self, model: str) -> dict[str, Any]:
        engine: dict[str, Any] = {"model": str(self._models / model), "dtype": "float32", "device": "cpu"}
        engine |= {"num_threads": 1, "kv_cache_tokens": 32_768, "max_num_requests": BATCH, "max_num_waiting": WAITING}
        return {"engine": engine | {"speculative": {"method": "none"}}}

    def _bundled(self, folder: Path) -> Path:
        config = folder / "fleet.yaml"
        config.write_text(yaml.safe_dump(self.values))
        return write_bundle(config, folder / "bundle", url=None, with_requirements=False).deployment

    @staticmethod
    def _without_paceline(folder: Path) -> Path:
        """A folder for PYTHONPATH that hides an installed Paceline."""
        hiding = folder / "hiding"
        hiding.mkdir()
        for package in ("deployments", "engine", "autoscale"):
            (hiding / f"{package}.py").write_text("raise ImportError('Paceline is not installed on this node')\n")
        return hiding

    def put(self, **args: Any) -> None:
        """Deploy with these `args`."""
        self.values["applications"][0]["args"] |= args
        response = httpx.put(self._applications, json=self.values, timeout=120)
        assert response.is_success, response.text

    def status(self) -> str:
        app = httpx.get(self._applications, timeout=30).json()["applications"]["paceline"]
        if app["status"] == "DEPLOY_FAILED":
            raise RuntimeError(json.dumps(app)[-6000:])
        return str(app["status"])

    def is_running(self) -> bool:
        return self.status() == "RUNNING" and httpx.get(f"{self.url}/health", timeout=10).is_success

    def files(self) -> set[str]:
        """Replicas that have a target file."""
        return {file.stem for file in self.targets.glob("*.json")}

    def living(self) -> dict[str, str]:
        """Address of the metrics by replica, from the route that Prometheus asks."""
        entries = httpx.get(f"{self.url}/metrics/targets", timeout=30).raise_for_status().json()
        return {entry["labels"]["replica"]: entry["targets"][0] for entry in entries}

    def in_flight(self) -> list[float]:
        """Requests that each living replica computes or holds, summed over several readings."""
        sums: Counter[str] = Counter()
        for _ in range(READINGS):
            for replica, address in self.living().items():
                sums[replica] += sum(sample(address, f"paceline_{kind}_requests") for kind in ("running", "waiting"))
        return list(sums.values())

    def desired(self) -> set[float]:
        return {sample(address, "paceline_desired_replicas") for address in self.living().values()}

    def node_of(self, title: str) -> Any:
        """The node that runs the actor with this title."""
        for node in self.nodes:
            if any(process.cmdline()[:1] == [f"ray::{title}"] for process in self.processes(node)):
                return node
        raise LookupError(title)

    @staticmethod
    def processes(node: Any) -> list[psutil.Process]:
        """The raylet of a node, and all that it has started."""
        root = psutil.Process(node.all_processes["raylet"][0].process.pid)
        found = [root, *root.children(recursive=True)]
        return [process for process in found if process.status() != psutil.STATUS_ZOMBIE]

    def kill(self, node: Any) -> None:
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)

    def add(self) -> None:
        self.nodes.append(self.cluster.add_node(num_cpus=1))


def sample(address: str, name: str) -> float:
    """A metric of one replica, summed over its labels."""
    text = httpx.get(f"http://{address}/metrics", timeout=30).text
    families = text_string_to_metric_families(text)
    return sum(one.value for family in families for one in family.samples if one.name == name)


def life(fleet: Fleet) -> Iterator[tuple[str, Any]]:
    """What is seen, by name."""
    scaling = {"min_replicas": 1, "max_replicas": 3, "tpot_s": 1.0, "upscale_delay_s": 1, "look_back_s": 3}
    fleet.put(autoscaling=scaling | {"downscale_delay_s": 600})  # the number stays while nothing is asked
    yield "first_s", wait_for("one replica", lambda: fleet.is_running() and len(fleet.living()) == 1)
    yield "cached_share_of_one", cached_share(fleet.url, "one")
    with Load(fleet.url, STREAMS) as load:
        yield "up_s", wait_for("three replicas", lambda: len(fleet.living()) == 3)
        yield "desired_s", wait_for("three replicas desired, says each", lambda: fleet.desired() == {3.0})
        yield "in_flight", fleet.in_flight()
    yield "failures_while_scaling", [answer.text for answer in load.failures]
    # Sessions are hashed, so a replica may get six of eight and send some on. Three sets of chats even that out.
    yield "cached_share_of_three", statistics.mean(cached_share(fleet.url, f"three{each}") for each in range(3))
    yield "burst", burst(fleet.url, 2 * (BATCH + WAITING))
    yield "burst_of_a_session", burst(fleet.url, 2 * (BATCH + WAITING), **{"x-session-id": "busy"})
    with Load(fleet.url, STREAMS) as load:
        old = set(fleet.living())
        fleet.put(autoscaling=scaling | {"downscale_delay_s": 5}, **fleet.engine("second"))
        wait_for("new replicas only", lambda: fleet.status() == "RUNNING" and not old & fleet.living().keys())
        yield "failures_in_upgrade", [answer.text for answer in load.failures]
        yield "texts_in_upgrade", len(load.texts)
        replaced_s = time.monotonic()

        def later_texts() -> list[str]:
            return [answer.text for answer in load.answers if answer.begin_s > replaced_s + HEARD_S]

        wait_for("answers", lambda: len(later_texts()) > STREAMS)
        yield "texts_after_upgrade", len(set(later_texts()))
    yield "down_s", wait_for("one replica again", lambda: len(fleet.living()) == 1)
    yield "files_gone_s", wait_for("the file of one replica", lambda: len(fleet.files()) == 1)


def death(fleet: Fleet) -> Iterator[tuple[str, Any]]:
    """What is seen, by name."""
    fleet.put(num_replicas=3)
    wait_for("three replicas", lambda: fleet.is_running() and len(fleet.living()) == 3)
    with Load(fleet.url, STREAMS) as load:
        wait_for("answers", lambda: len(load.answers) > STREAMS)
        load.answers.clear()
        old = set(fleet.living())
        killed_s = time.monotonic()
        fleet.kill(fleet.node_of("ControllerActor"))
        yield "targets_s", wait_for("targets of the living", lambda: len(old & fleet.living().keys()) == 2)
        yield "files_s", wait_for("files of the living", lambda: len(fleet.files()) == 2)
        fleet.add()
        yield "replaced_s", wait_for("a replica on the new node", lambda: len(fleet.living()) == 3)
        yield "lost_requests", [answer.text for answer in load.failures if answer.begin_s <= killed_s]
        yield "lost_later", [a.text for a in load.failures if a.begin_s > killed_s + HEARD_S]
        yield "answers_after_death", len(load.answers)


def cut(fleet: Fleet) -> Iterator[tuple[str, Any]]:
    """What is seen, by name."""
    fleet.put(num_replicas=2)
    wait_for("two replicas", lambda: fleet.is_running() and len(fleet.living()) == 2)
    node = fleet.node_of("ControllerActor")
    stopped = fleet.processes(node)
    with Load(fleet.url, clients=6) as load:
        time.sleep(2.0)
        cut_s = time.monotonic()
        for process in stopped:
            process.send_signal(signal.SIGSTOP)
        try:
            yield "targets_s", wait_for("targets of the living", lambda: len(fleet.living()) == 1)
            time.sleep(5.0)
        finally:
            for process in stopped:
                process.kill()
    yield "failures", [answer.text for answer in load.failures]
    yield "failures_later", [a.text for a in load.failures if a.begin_s > cut_s + HEARD_S]
    yield "answers", len(load.answers)
    yield "longest_s", max(answer.end_s - answer.begin_s for answer in load.answers)


def main(what: str, models: Path) -> None:
    """Run a course of events and print what was seen."""
    course, num_nodes = {"life": (life, 3), "death": (death, 3), "cut": (cut, 2)}[what]
    with tempfile.TemporaryDirectory(prefix="fleet-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        fleet = Fleet(Path(folder), models, num_nodes=num_nodes)
        seen: dict[str, Any] = {}
        begin = time.monotonic()
        try:
            for name, value in course(fleet):
                seen[name] = value
                print(f"{time.monotonic() - begin:6.1f} s  {name}: {value}", file=sys.stderr, flush=True)
        finally:
            fleet.cluster.shutdown()
    print(json.dumps(seen))


if __name__ == "__main__":
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1"}
    main(sys.argv[1], Path(sys.argv[2]))
