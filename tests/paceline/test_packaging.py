"""Two commands on anyone's machine: which Python and which torch are taken, and that their packages can be had.

The tests marked `index` resolve with metadata of the package index and download no package.
"""

from __future__ import annotations

import functools
import http.server
import importlib.metadata
import importlib.util
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MACHINES = ("x86_64", "aarch64")
PLATFORM = "manylinux_2_28"


def load(name: str) -> ModuleType:
    """A script of .ci as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


install = load("install")


def uv(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """uv of this environment; skips where the package index does not answer, unless CI runs this."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    command = shutil.which("uv", path=path)
    assert command is not None, "uv is not installed; it belongs to the dev extra"
    done = subprocess.run(
        [command, "--no-progress", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        check=False,
        env=os.environ | {"UV_HTTP_TIMEOUT": "120"},
    )
    offline = re.search(r"dns error|failed to lookup|Could not connect|Connection refused|timed out", done.stderr)
    if done.returncode != 0 and offline and not os.environ.get("CI"):
        pytest.skip("the package index does not answer")
    return done


def compile_for(python: str, machine: str, *options: str | Path) -> subprocess.CompletedProcess[str]:
    """Resolve everything that `make` installs for one interpreter and platform, from wheels only."""
    target = ("--python-version", python, "--python-platform", f"{machine}-{PLATFORM}")
    fixed = ("--extra", "dev", "--only-binary", ":all:", "-c", CONSTRAINTS, "--no-annotate", "--no-header")
    return uv("pip", "compile", "pyproject.toml", *target, *fixed, *options)


def names(requirements: str) -> set[str]:
    return {re.split(r"[=;\s]", line)[0] for line in requirements.splitlines() if "==" in line}


@functools.cache
def cpu_build_requirements() -> list[str]:
    """What the CPU build of torch depends on, as its own metadata says; the same for every interpreter."""
    torch = importlib.metadata.distribution("torch")
    if not torch.version.endswith("+cpu"):
        pytest.skip(f"the CPU build of torch is not installed here, but {torch.version}")
    return [requirement for requirement in torch.requires or [] if "extra ==" not in requirement]


@pytest.mark.index
def test_every_interpreter_and_build_resolves(tmp_path: Path) -> None:
    """All pairs at once, because most of the time goes to waiting for the index."""
    cpu_build_requirements()  # Skips the test where they are not known.
    pairs = list(itertools.product(PYTHONS, MACHINES, ("cpu", "cuda")))
    with ThreadPoolExecutor(len(pairs)) as pool:
        list(pool.map(lambda pair: check_that_it_resolves(*pair, tmp_path / "-".join(pair)), pairs))


def check_that_it_resolves(python: str, machine: str, build: str, config: Path) -> None:
    config.touch()
    if build == "cpu":
        version = (ROOT / "constraints.txt").read_text().partition("\ntorch==")[2].split()[0]
        requirements = json.dumps(cpu_build_requirements())
        config.write_text(
            f'dependency-metadata = [{{ name = "torch", version = "{version}", requires-dist = {requirements} }}]\n'
        )
    done = compile_for(python, machine, "--config-file", config)
    assert done.returncode == 0, (config.name, done.stderr)
    resolved = names(done.stdout)
    assert {"ray", "torch", "pytest"} <= resolved <= names(CONSTRAINTS.read_text()), config.name
    assert ("nvidia-nccl-cu13" in resolved) == (build == "cuda"), config.name


@pytest.mark.index
def test_a_python_that_is_too_new_is_refused(tmp_path: Path) -> None:
    """The upper bound of requires-python is where Ray's wheels end."""
    done = compile_for("3.15", "x86_64")
    assert done.returncode != 0
    assert "ray" in done.stderr


@pytest.mark.index
def test_constraints_are_what_make_lock_writes(tmp_path: Path) -> None:
    copy = tmp_path / "constraints.txt"
    shutil.copyfile(CONSTRAINTS, copy)
    command = re.search(r"^LOCK := uv (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert command is not None
    done = uv(*command.group(1).split(), "--output-file", copy)
    assert done.returncode == 0, done.stderr
    assert copy.read_text() == CONSTRAINTS.read_text()


@pytest.mark.index
def test_the_download_is_as_large_as_make_says(tmp_path: Path) -> None:
    lock = tmp_path / "pylock.toml"
    done = compile_for("3.12", "x86_64", "--format", "pylock.toml", "--output-file", lock)
    assert done.returncode == 0, done.stderr
    sizes: dict[str, int] = {}
    for package in tomllib.loads(lock.read_text())["packages"]:
        for wheel in package.get("wheels", []):
            name = wheel["url"].rpartition("/")[2].removesuffix(".whl")
            *_, python, abi, platform = name.split("-")
            fits = re.search(r"py3|cp312", python) or abi == "abi3"
            if fits and ("x86_64" in platform or platform == "any") and "musl" not in platform:
                sizes[package["name"]] = max(sizes.get(package["name"], 0), wheel["size"])
    of_cuda = sum(size for name, size in sizes.items() if name.startswith(("nvidia", "cuda")))
    total = sum(sizes.values())
    assert total / 1e9 == pytest.approx(install.DOWNLOAD_GB["cuda"], abs=0.2)
    cpu_torch = 0.2e9
    assert (total - of_cuda - sizes["torch"] + cpu_torch) / 1e9 == pytest.approx(install.DOWNLOAD_GB["cpu"], abs=0.1)


class Index(http.server.BaseHTTPRequestHandler):
    """A package index that has torch and nothing else."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/whl/torch/" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        del format, args


@pytest.fixture(scope="module")
def index() -> Iterator[str]:
    server = http.server.HTTPServer(("127.0.0.1", 0), Index)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_cpu_build_comes_from_its_index(index: str) -> None:
    build, chosen, reason = install.choose_build({"TORCH": "cpu", "TORCH_INDEX": f"{index}/whl"})
    assert (build, chosen) == ("cpu", f"{index}/whl")
    assert "CPU build" in reason
    torch, project = install.install_steps(chosen, "dev")
    assert torch == ["--no-deps", "--index-url", chosen, "torch"]
    assert project == ["-e", ".[dev]"]


def test_without_that_index_the_default_one_is_used_and_the_price_is_said(index: str) -> None:
    build, chosen, reason = install.choose_build({"TORCH": "cpu", "TORCH_INDEX": f"{index}/nothing"})
    assert (build, chosen) == ("cuda", None)
    assert "larger" in reason
    assert install.install_steps(None, "") == [["-e", "."]]


def test_the_build_can_be_chosen() -> None:
    assert install.choose_build({"TORCH": "cuda"})[:2] == ("cuda", None)
    with pytest.raises(SystemExit, match="TORCH=rocm given; allowed are cpu, cuda"):
        install.choose_build({"TORCH": "rocm"})


def find_python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["/bin/sh", str(ROOT / ".ci" / "find-python"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={"PATH": str(folder)}, check=False)


def interpreter(folder: Path, name: str, version: str, modules: str = "") -> Path:
    """A command that takes this Python's place and says that it is of another version."""
    path = folder / name
    path.write_text(
        f"#!/bin/sh\nexec {sys.executable} -c \"import sys; sys.version_info = ({version}, 0, 'final', 0); "
        f'sys.executable = \'{path}\'{modules}; exec(sys.argv[1])" "$2"\n'
    )
    path.chmod(0o755)
    return path


def test_the_first_supported_python_is_found(tmp_path: Path) -> None:
    interpreter(tmp_path, "python3", "3, 10")
    interpreter(tmp_path, "python3.11", "3, 11")
    newer = interpreter(tmp_path, "python3.13", "3, 13")
    assert find_python(tmp_path).stdout.strip() == str(newer)
    assert find_python(tmp_path, "python3.11").stdout.strip() == str(tmp_path / "python3.11")


@pytest.mark.parametrize("version", ["3, 10", "3, 15"])
def test_an_unsupported_python_is_refused(tmp_path: Path, version: str) -> None:
    chosen = interpreter(tmp_path, "mine", version)
    done = find_python(tmp_path, str(chosen))
    assert done.returncode == 1
    assert "is not a Python 3.11 to 3.14" in done.stderr
    nothing = find_python(tmp_path)
    assert nothing.returncode == 1
    assert "set PYTHON=" in nothing.stderr


def test_a_python_that_cannot_make_environments_is_passed_over(tmp_path: Path) -> None:
    interpreter(tmp_path, "python3", "3, 12", "; sys.modules['ensurepip'] = None")
    other = interpreter(tmp_path, "python3.14", "3, 14")
    assert find_python(tmp_path).stdout.strip() == str(other)


def test_the_tests_of_every_python_get_the_arguments_as_they_are_and_a_failure_fails(tmp_path: Path) -> None:
    interpreter(tmp_path, "python3.12", "3, 12")
    interpreter(tmp_path, "python3.13", "3, 13")
    make = tmp_path / "make"
    # It splits ARGS as the shell of a recipe does. The tests of 3.12 fail.
    make.write_text(
        '#!/bin/sh\nvenv=$3\neval "set -- ${4#ARGS=}"\nprintf "[%s]" "$venv" "$@"\n[ "$venv" != VENV=.venv-3.12 ]\n'
    )
    make.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)}
    command = [str(ROOT / ".ci" / "test-all"), "tests/engine", "-k", "pool or queue"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    for version, state in (("3.12", "failed"), ("3.13", "passed")):
        assert f"[VENV=.venv-{version}][tests/engine][-k][pool or queue]" in done.stdout
        assert f"Python {version}: {state}" in done.stdout


def test_every_package_is_in_the_wheel() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    top = {name for name in settings["packages"] if "." not in name}
    found = {
        str(file.parent.relative_to(ROOT)).replace("/", ".")
        for name in top
        for file in (ROOT / name).rglob("__init__.py")
    }
    assert set(settings["packages"]) == found


def test_a_requirements_file_gets_the_same_build_of_torch_first(tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text("# a comment about torch\ntorch==2.13.0\nhttpx\n")
    assert install.file_steps("index", file) == [
        ["--no-deps", "--index-url", "index", "torch==2.13.0"],
        ["-r", str(file)],
    ]
    assert install.file_steps(None, file) == [["-r", str(file)]]
    file.write_text("httpx\n")
    assert install.file_steps("index", file) == [["-r", str(file)]]
