"""guidellm: a report with 1 and 4 streams."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

STREAMS = (1, 4)
NUM_REQUESTS = int(os.environ.get("NUM_REQUESTS", "8"))
FOLDER = Path(tempfile.mkdtemp())
spec = {
    "backend": {
        "kind": "openai_http",
        "target": os.environ["BASE_URL"].removesuffix("/v1"),
        "model": os.environ["MODEL"],
        "request_format": "/v1/chat/completions",
        "http2": False,
        "extras": {"body": {"temperature": 0}},
    },
    "profile": {"kind": "concurrent", "streams": list(STREAMS)},
    "data": [{"kind": "json_file", "path": str(Path(os.environ["TASKS"]) / "prompts.jsonl")}],
    "tokenizer": {"kind": "huggingface_auto", "model": os.environ["TOKENIZER"]},
    "constraints": [{"kind": "max_requests", "count": NUM_REQUESTS}],
    "outputs": [{"kind": "json", "path": str(FOLDER / "report.json")}],
}
(FOLDER / "scenario.json").write_text(json.dumps({"metadata": {"name": "paceline"}, "spec": spec}))
command = [str(Path(sys.executable).with_name("guidellm")), "run", "--config", str(FOLDER / "scenario.json")]
environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(FOLDER)}
subprocess.run([*command, "--disable-console"], check=True, env=environment, cwd=FOLDER)
report = json.loads((FOLDER / "report.json").read_text())
assert len(report["benchmarks"]) == len(STREAMS)
for streams, benchmark in zip(STREAMS, report["benchmarks"], strict=True):
    metrics = benchmark["metrics"]
    totals = metrics["request_totals"]
    figures = {
        "streams": streams,
        "requests": totals["successful"],
        "tokens_per_s": round(metrics["output_tokens_per_second"]["successful"]["mean"], 1),
        "ttft_ms": round(metrics["time_to_first_token_ms"]["successful"]["median"], 1),
        "itl_ms": round(metrics["inter_token_latency_ms"]["successful"]["median"], 2),
    }
    print(json.dumps(figures))
    assert totals["successful"] >= NUM_REQUESTS - 1  # guidellm 0.8.1 may end before it has counted its last request
    assert totals["errored"] == totals["incomplete"] == 0
