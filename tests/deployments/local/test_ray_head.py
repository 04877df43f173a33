"""The private Ray head: a port that somebody takes in the last moment costs a second try, not the start."""

from __future__ import annotations

import socket

import pytest

from deployments.local.ports import free_ports
from deployments.local.ray_head import LocalRay


@pytest.mark.ray
@pytest.mark.parametrize("place", [0, 1], ids=["control plane", "dashboard"])
def test_a_port_that_is_taken_before_ray_listens_there_is_replaced(place: int) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        choices: list[list[int]] = []

        def choose(*preferred: int) -> list[int]:
            ports = free_ports(*preferred)
            if not choices:
                ports[place] = taken.getsockname()[1]
            choices.append(ports)
            return ports

        with LocalRay(num_cpus=1, choose_ports=choose) as ray:
            assert ray.http.get(f"{ray.dashboard_url}/api/version", timeout=30).is_success
        assert len(choices) == 2
