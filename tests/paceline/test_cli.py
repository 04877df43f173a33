"""The command as a user runs it: fast help, a version, one line for each error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from autoscale.simulation.hardware import HARDWARE
from autoscale.simulation.simulator import WORKLOADS
from deployments.local import yaml_config
from engine.checkpoint.store import resolve_model
from paceline import __version__
from paceline.cli import main
from paceline.reports import HARDWARE_NAMES, WORKLOAD_NAMES

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "ray", "transformers", "xgrammar", "numpy", "fastapi", "httpx", "rich", "pydantic"}


def modules_after(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has imported after running some code."""
    probe = f"{code}\nimport sys; print('MODULES', *sorted({{m.partition('.')[0] for m in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", probe],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    return set(done.stdout.rpartition("MODULES")[2].split())


def test_help_imports_nothing_that_takes_time() -> None:
    assert modules_after("from paceline.cli import parser; parser().format_help()").isdisjoint(HEAVY)


def test_what_waits_beside_the_server_is_lean() -> None:
    """The process of `paceline serve` lives as long as the server and only waits."""
    loaded = modules_after("import deployments.local.server, deployments.local.doctor")
    assert loaded.isdisjoint({"torch", "ray", "transformers", "xgrammar", "numpy", "fastapi"})


def test_the_replica_imports_no_torch() -> None:
    """Its process computes nothing. It and the task that builds the application import these modules."""
    loaded = modules_after("import deployments.app, deployments.replica")
    assert loaded.isdisjoint({"torch", "transformers", "xgrammar"})


def test_the_replica_reads_its_tokenizer_and_the_values_of_the_engine_without_torch() -> None:
    """Values are unpickled in the replica, which imports the modules that define them."""
    folder = resolve_model("smollm2", progress=False)
    values = "engine.draft_buffer.handle, engine.draft.messages, engine.workers.shard_ready, engine.metrics.counters"
    loaded = modules_after(
        f"import {values}\nfrom deployments.text.tokenizer import TextCodec\n"
        f"TextCodec.from_folder({str(folder)!r}).encode_chat([{{'role': 'user', 'content': 'hi'}}])"
    )
    assert loaded.isdisjoint({"torch", "xgrammar"})


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"paceline {__version__}\n"


def test_names_that_help_shows_are_those_that_exist() -> None:
    assert set(HARDWARE_NAMES) == set(HARDWARE)
    assert set(WORKLOAD_NAMES) == set(WORKLOADS)


def two_applications(tmp_path: Path) -> list[str]:
    values = yaml_config.load(yaml_config.DEFAULT_FILE)
    values["applications"].append(values["applications"][0] | {"name": "second", "route_prefix": "/second"})
    path = tmp_path / "two.yaml"
    path.write_text(yaml.safe_dump(values))
    return ["--config", str(path)]


def no_such_file(tmp_path: Path) -> list[str]:
    return ["--config", str(tmp_path / "gone.yaml")]


def no_such_keys(tmp_path: Path) -> list[str]:
    return ["--port", "0", "--api-keys", str(tmp_path / "gone.yaml")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (two_applications, "paceline: applications: 2 given; `paceline serve` takes one"),
        (no_such_file, "gone.yaml: No such file or directory"),
        (no_such_keys, "paceline: http_options.port: 0 given; allowed are 1 to 65535"),
    ],
)
def test_an_error_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: object, message: str
) -> None:
    assert callable(options)
    assert main(["serve", *options(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_init_writes_files_that_check_accepts_and_keeps_what_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "made" / "here"
    assert main(["init", str(folder)]) == 0
    written = sorted(folder.glob("*.yaml"))
    assert [path.name for path in written] == sorted(path.name for path in (ROOT / "deployments").glob("*.yaml"))
    written[0].write_text("mine")
    assert main(["init", str(folder)]) == 0
    assert f"{written[0]}: exists, kept" in capsys.readouterr().out
    assert written[0].read_text() == "mine"
    assert main(["check", str(written[1])]) == 0


def test_init_where_nothing_can_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    assert main(["init", str(blocked)]) == 2
    assert capsys.readouterr().err == f"paceline: {blocked}: File exists\n"


def test_check_knows_serve_s_own_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = yaml_config.load(yaml_config.DEFAULT_FILE)
    values["proxy_location"] = "Nowhere"
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(values))
    assert main(["check", str(path)]) == 2
    assert "proxy_location" in capsys.readouterr().err


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = f"{sys.executable} -m paceline.cli metrics | head -1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.stderr == ""
