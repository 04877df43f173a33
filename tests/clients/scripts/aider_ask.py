"""aider: a question about a file, streamed."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

folder = Path(tempfile.mkdtemp())
(folder / "weather.py").write_text('def weather(city):\n    return f"sunny in {city}"\n')
command = [
    str(Path(sys.executable).with_name("aider")),
    *("--model", f"openai/{os.environ['MODEL']}", "--edit-format", "ask", "--message", "What does weather() return?"),
    *("--no-git", "--yes-always", "--no-check-update", "--no-show-model-warnings", "--analytics-disable"),
    *("--no-pretty", "--map-tokens", "0", "--no-show-release-notes", "weather.py"),
]
environment = os.environ | {"OPENAI_API_BASE": os.environ["BASE_URL"], "OPENAI_API_KEY": "none", "HOME": str(folder)}
done = subprocess.run(
    command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL
)
assert done.returncode == 0, done.stderr
assert "Tokens:" in done.stdout, done.stdout
assert os.environ["ANSWER"] in done.stdout, done.stdout
