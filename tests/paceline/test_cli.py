"""The command as a user runs it: fast help, a version, one line for each error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from autoscale.policy.cost_model import BATCH_KNOTS, ROW_KNOTS, CostTable
from autoscale.profiling.table_cache import TableCache
from autoscale.simulation.hardware import HARDWARE
from autoscale.simulation.shapes import SHAPES
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


def test_a_plan_is_printed_as_a_table_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "llama-3.1-70b", "--gpus", "4xH100", "--draft", "llama-3.2-1b", "--price", "3"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    for expected in ("Memory, shard 0", "Drafting pays", "price of", "0.6 of drafted tokens", "70% of the data sheet"):
        assert expected in " ".join(printed.split()), expected
    assert main([*command, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["tensor_parallel_size"], plan["num_replicas"]) == (4, 1)
    (first, *_) = plan["points"]
    assert first["cost_per_million"] == pytest.approx(4 * 3 / 3600 / first["tokens_per_s"] * 1e6)
    assert first["tokens_per_s"] > first["plain_tokens_per_s"]


def test_a_plan_counts_the_records_of_a_quantised_kv_cache(capsys: pytest.CaptureFixture[str]) -> None:
    """Llama 3.1 8B keeps heads of 128 values: 256 bytes in bfloat16, 132 in FP8."""
    tokens = {}
    for dtype in ("auto", "fp8"):
        assert main(["plan", "llama-3.1-8b", "--gpus", "L4", "--kv-cache-dtype", dtype, "--json"]) == 0
        tokens[dtype] = json.loads(capsys.readouterr().out)["kv_tokens"]
    assert 1.8 < tokens["fp8"] / tokens["auto"] < 256 / 132


def test_a_plan_of_this_cpu_uses_the_costs_that_the_server_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SHAPES["smollm2-135m"]))
    assert main(["plan", str(model)]) == 2
    assert "were not measured on this machine" in capsys.readouterr().err
    table = CostTable((0.02,) * len(ROW_KNOTS), (0.001,) * len(BATCH_KNOTS), overhead_s=0.001, sample_row_s=1e-9)
    identity = {"model": str(model.resolve()), "device": "cpu", "draft": "/models/small-draft"}
    TableCache(tmp_path / "costs", identity).store(table)
    assert main(["plan", str(model), "--json", "--streams", "1"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["points"][0]["plain_tpot_s"] == pytest.approx(0.021, rel=1e-4)
    assert plan["pays_up_to"] is None
    assert main(["plan", str(model), "--json", "--streams", "1", "--draft", "small-draft"]) == 0
    assert json.loads(capsys.readouterr().out)["points"][0]["mean_k"] > 0
    assert main(["plan", str(model), "--draft", "another"]) == 2
    assert "start `paceline serve" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["llama-9"], "'llama-9' is no folder with a config.json"),
        (["llama-9", "--gpus", "L4"], "neither a folder with a config.json nor one of"),
        (["llama-3.1-8b", "--gpus", "7xZ80"], "--gpus: '7xZ80' given; allowed is a count and a name, such as 4xH100"),
        (["llama-3.1-8b", "--gpus", "L4", "--acceptance", "1"], "--acceptance: 1.0 given; allowed are 0 to below 1"),
        (["llama-3.1-8b", "--gpus", "L4", "--price", "0"], "--price: 0.0 given"),
        (["llama-3.1-8b", "--gpus", "L4", "--context", "0"], "--context: 0 given"),
        (["llama-3.1-8b", "--gpus", "L4", "--streams", "513"], "--streams: allowed are 1 to --max-step-tokens"),
        (["llama-3.1-8b", "--gpus", "L4", "--draft", "eagle", "--k", "99"], "speculative.k"),
        (["llama-3.1-8b", "--gpus", "L4", "--kv-cache-dtype", "int8"], "int8 given, but device is cuda"),
        (["smollm2", "--tp", "2"], "--tp: 2 given; a plan of this CPU has one shard"),
    ],
)
def test_a_plan_refuses_bad_options_in_one_line(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


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


def test_init_with_answers_writes_one_deployment_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(tmp_path), "--model", "org/model", "--tp", "2", "--draft", "none", "--replicas", "3"]) == 0
    (path,) = tmp_path.iterdir()
    (settings,) = yaml_config.check(yaml_config.load(path))
    assert (settings.engine.model, settings.engine.tensor_parallel_size, settings.num_replicas) == ("org/model", 2, 3)
    assert settings.engine.speculative.method == "none"
    assert main(["check", str(path)]) == 0
    assert main(["init", str(tmp_path / "x"), "--tp", "0"]) == 2
    assert "tensor_parallel_size" in capsys.readouterr().err
    assert main(["init", str(tmp_path / "x"), "--image", "a"]) == 2
    assert "--image: a given; it is for --kubernetes" in capsys.readouterr().err


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


@pytest.mark.parametrize(("device", "kv_dtype"), [("cpu", "int8"), ("cuda", "fp8")])
def test_check_says_that_a_quantised_cache_is_lossy(
    device: str, kv_dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = yaml_config.load(yaml_config.DEFAULT_FILE)
    path = tmp_path / "lossy.yaml"
    engine = yaml_config.only_application(values)["args"]["engine"]
    for chosen in ("auto", kv_dtype):
        engine |= {"device": device, "kv_cache_dtype": chosen}
        path.write_text(yaml.safe_dump(values))
        assert main(["check", str(path)]) == 0
        assert (f"KV cache: {kv_dtype}, which is lossy" in capsys.readouterr().out) == (chosen == kv_dtype)


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
