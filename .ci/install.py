"""Makes the virtual environment of `make`: chooses the build of torch, says what will be downloaded, installs.

Runs on a bare Python, so it uses the standard library only. Installs with uv where that is there, else with pip; both
use the user's own index settings. Versions come from constraints.txt.

    install.py VENV [EXTRA]        the project
    install.py VENV -r FILE        what a requirements file lists, without the project
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Where the CPU builds of torch are published; TORCH_INDEX names another one."""
DOWNLOAD_GB = {"cpu": 0.7, "cuda": 3.1}
"""Size of all packages by build of torch; a test compares it with what the package index says."""
DISK_GB = {"cpu": 2.4, "cuda": 7.5}
PROBE_S = 5.0


def main(venv: Path, extra: str) -> int:
    uv = shutil.which("uv")
    build, index, reason = choose_build(os.environ)
    print(f"Python {platform.python_version()} at {sys.executable}, {'uv' if uv else 'pip'} installs into {venv}")
    print(f"torch: {reason}")
    size = f"about {DOWNLOAD_GB[build]} GB to download, {DISK_GB[build]} GB on disk"
    print(f"{size}; packages in the cache of {'uv' if uv else 'pip'} are not downloaded again", flush=True)
    constraints = ["-c", str(ROOT / "constraints.txt")]
    return install(venv, [[*constraints, *arguments] for arguments in install_steps(index, extra)])


def main_of_file(venv: Path, file: Path) -> int:
    """Install what a requirements file lists."""
    print(f"{file.name} into {venv}", flush=True)
    index = choose_build(os.environ)[1] if torch_line(file) else None
    return install(venv, file_steps(index, file))


def install(venv: Path, steps: list[list[str]]) -> int:
    """Make the virtual environment if it is not there, and run each installation."""
    uv = shutil.which("uv")
    python = venv / "bin" / "python"
    if not python.exists():
        make = [uv, "venv", "--quiet", "--python", sys.executable] if uv else [sys.executable, "-m", "venv"]
        subprocess.run([*make, str(venv)], check=True)
    for arguments in steps:
        client = [uv, "pip", "install", "--quiet", "--python", str(python)] if uv else _pip(python)
        done = subprocess.run([*client, *arguments], cwd=ROOT, check=False)
        if done.returncode != 0:
            print(f"make: the installation failed; {venv} is incomplete, and `make` continues it", file=sys.stderr)
            return done.returncode
    return 0


def _pip(python: Path) -> list[str]:
    return [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]


def install_steps(index: str | None, extra: str) -> list[list[str]]:
    """Arguments of each installation. torch comes first and alone, so that its index serves no other package."""
    project = ["-e", f".[{extra}]" if extra else "."]
    torch = [["--no-deps", "--index-url", index, "torch"]] if index else []
    return [*torch, project]


def file_steps(index: str | None, file: Path) -> list[list[str]]:
    """Arguments of each installation of a requirements file. The build of torch comes first, as for the project."""
    torch = torch_line(file)
    first = [["--no-deps", "--index-url", index, torch]] if index and torch else []
    return [*first, ["-r", str(file)]]


def torch_line(file: Path) -> str | None:
    """What a requirements file asks of torch; None if it does not name it."""
    return next((line.strip() for line in file.read_text().splitlines() if line.startswith("torch==")), None)


def choose_build(environ: os._Environ[str] | dict[str, str]) -> tuple[str, str | None, str]:
    """The build of torch, the index that has it (None: the default one), and the reason as a line for people.

    TORCH=cpu and TORCH=cuda decide; otherwise an NVIDIA GPU does.
    """
    wanted = environ.get("TORCH") or ("cuda" if has_gpu() else "cpu")
    if wanted not in DOWNLOAD_GB:
        raise SystemExit(f"make: TORCH={wanted} given; allowed are {', '.join(DOWNLOAD_GB)}")
    if wanted == "cuda":
        return "cuda", None, "CUDA build (an NVIDIA GPU is here, or TORCH=cuda)"
    index = environ.get("TORCH_INDEX") or CPU_INDEX
    if reaches(index):
        return "cpu", index, f"CPU build from {index} (no NVIDIA GPU, or TORCH=cpu)"
    return (
        "cuda",
        None,
        f"no NVIDIA GPU, but {index} with the CPU build cannot be reached; taking the default index, whose CUDA build "
        "works here too and is larger. TORCH_INDEX names another index",
    )


def has_gpu() -> bool:
    """Whether an NVIDIA driver is loaded that shows a GPU."""
    gpus = Path("/proc/driver/nvidia/gpus")
    return (gpus.is_dir() and any(gpus.iterdir())) or Path("/dev/nvidia0").exists() or Path("/dev/dxg").exists()


def reaches(index: str) -> bool:
    """Whether a package index answers for torch."""
    try:
        with urllib.request.urlopen(f"{index.rstrip('/')}/torch/", timeout=PROBE_S) as response:
            return bool(response.status == 200)
    except (OSError, ValueError, urllib.error.URLError):
        return False


if __name__ == "__main__":
    if sys.argv[2:3] == ["-r"]:
        sys.exit(main_of_file(Path(sys.argv[1]), Path(sys.argv[3]).resolve()))
    sys.exit(main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""))
