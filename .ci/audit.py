"""Checks the installed packages: each pinned, each at its pin, none on the list of known vulnerabilities.

The list in advisories.txt works offline. Where pip-audit is installed and its database can be reached, its findings
count as well.

    audit.py            exit status 1 when something is wrong, one line each
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement

HERE = Path(__file__).parent
UNPINNED = {"paceline", "pip", "setuptools", "wheel"}
"""This project, and the packages that install it."""
OFFLINE = ("ConnectionError", "Max retries", "NameResolution", "ProxyError", "timed out", "Timeout", "HTTPError")


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(text: str) -> dict[str, str]:
    """Versions by name, of a constraints file. Platform markers are left out: a package has one version everywhere."""
    lines = [line.partition("#")[0].partition(";")[0].strip() for line in text.splitlines()]
    pins = [line.split("==", 1) for line in lines if "==" in line]
    return {canonical(pin[0]): pin[1] for pin in pins}


def read_advisories(text: str) -> list[tuple[Requirement, str]]:
    """Versions that must not be installed, each with its reason."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(Requirement(line.partition("  ")[0]), line.partition("  ")[2].strip()) for line in lines]


def problems(installed: dict[str, str], pins: dict[str, str], advisories: list[tuple[Requirement, str]]) -> list[str]:
    """One line for each package that is wrong."""
    found = []
    for name, version in sorted(installed.items()):
        if name not in pins and name not in UNPINNED:
            found.append(f"{name} {version} is not pinned in constraints.txt")
        elif name in pins and pins[name] != version:
            found.append(f"{name} {version} is installed, constraints.txt says {pins[name]}")
    for bad, reason in advisories:
        version_now = installed.get(canonical(bad.name))
        if version_now is not None and bad.specifier.contains(version_now, prereleases=True):
            found.append(f"{bad.name} {version_now}: {reason}")
    return found


def ask_pip_audit() -> list[str]:
    """Lines of pip-audit; none where it is not installed or its database cannot be reached."""
    if importlib.util.find_spec("pip_audit") is None:
        print("pip-audit is not installed; only .ci/advisories.txt is used", file=sys.stderr)
        return []
    command = [sys.executable, "-m", "pip_audit", "--strict", "--progress-spinner", "off"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode == 0 or any(sign in done.stderr for sign in OFFLINE):
        return []
    return done.stdout.splitlines()


def main() -> int:
    # A build of a version, such as 2.13.0+cpu, is that version.
    installed = {canonical(item.metadata["Name"]): item.version.partition("+")[0] for item in distributions()}
    pins = read_pins((HERE.parent / "constraints.txt").read_text())
    found = problems(installed, pins, read_advisories((HERE / "advisories.txt").read_text()))
    found += ask_pip_audit()
    print("\n".join(found) or f"{len(installed)} packages: pinned, and none with a known vulnerability")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
