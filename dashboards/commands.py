"""The actions of `paceline dashboards`: options in, lines on the terminal and an exit status out."""

from __future__ import annotations

import argparse
import os
import sys
from importlib.metadata import version

import httpx

from dashboards.grafana_json import to_json
from dashboards.install import InstallError
from dashboards.install import install as install_into
from dashboards.render import PACKAGE, boards, stale, write


def install(options: argparse.Namespace) -> int:
    """Write the dashboards into a Grafana and print their addresses. Returns the exit status."""
    token = options.token or os.environ.get("GRAFANA_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        if not options.grafana.startswith(("http://", "https://")):
            raise InstallError(f"--grafana: {options.grafana!r} given; allowed: an address such as http://host:3000")
        with httpx.Client(base_url=options.grafana, headers=headers, timeout=options.timeout) as client:
            paths = install_into(client, [to_json(board) for board in boards()], version=version("paceline"))
            for path in paths:
                print(client.base_url.copy_with(userinfo=b"").join(path))
    except (InstallError, httpx.InvalidURL) as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 2
    return 0


def render(options: argparse.Namespace) -> int:
    """Write the files, or with --check report those that are not current. Returns the exit status."""
    folder = options.out or PACKAGE
    if not options.check:
        for path in write(folder):
            print(path)
        return 0
    outdated = stale(folder)
    for path in outdated:
        print(f"{folder / path}: not current; run `paceline dashboards render`", file=sys.stderr)
    return 1 if outdated else 0
