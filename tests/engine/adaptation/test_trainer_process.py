"""The trainer as a child process.

Promises: it stands still while it is paused; it ends with its parent, also a killed one and also while it is paused;
sending never waits, and what waits is bounded; its priority is the lowest.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import scripted_trainer

from engine.adaptation.messages import Document, FromTrainer, Progress, Setup
from engine.adaptation.trainer_process import TRAINER, TrainerProcess

SETUP = Setup(draft_folder="d", target_folder="t", versions_folder="v", buffer_bytes=1, k=2)
DEADLINE_S = 120.0


def document(num_bytes: int = 8) -> Document:
    return Document(tokens=bytes(num_bytes), features=b"", itemsize=4, first_generated=1)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Inbox:
    """Keeps what a trainer sends."""

    def __init__(self) -> None:
        self.messages: list[FromTrainer] = []

    @property
    def num_documents(self) -> int:
        return max((m.num_documents for m in self.messages if isinstance(m, Progress)), default=0)


def start(inbox: Inbox, *, max_pending_bytes: int = 1 << 20) -> TrainerProcess:
    command = scripted_trainer.command(1000)
    return TrainerProcess(SETUP, on_message=inbox.messages.append, max_pending_bytes=max_pending_bytes, command=command)


def test_documents_arrive_while_it_runs_and_none_while_it_is_paused() -> None:
    inbox = Inbox()
    trainer = start(inbox)
    try:
        assert trainer.is_paused
        until(lambda: psutil.Process(trainer.pid).status() == psutil.STATUS_STOPPED)
        trainer.send(document())
        trainer.resume()
        until(lambda: inbox.num_documents == 1)
        trainer.pause()
        until(lambda: psutil.Process(trainer.pid).status() == psutil.STATUS_STOPPED)
        used_s = trainer.used_s
        assert used_s > 0
        for _ in range(5):
            trainer.send(document())
        assert inbox.num_documents == 1
        assert trainer.used_s == used_s
        trainer.resume()
        until(lambda: inbox.num_documents == 6)
    finally:
        trainer.close()
    assert not trainer.is_alive
    trainer.close()


def test_what_waits_is_bounded_and_the_oldest_is_dropped() -> None:
    """A paused trainer reads nothing: what exceeds the socket's own memory and the bound is dropped."""
    inbox = Inbox()
    trainer = start(inbox, max_pending_bytes=100_000)
    try:
        for _ in range(2000):
            trainer.send(document(10_000))
        assert trainer._pending_bytes <= 100_000
        trainer.resume()
        trainer.send(document(8))
        until(lambda: inbox.num_documents >= 5 and not trainer._pending)
        assert inbox.num_documents < 1000
    finally:
        trainer.close()


def test_a_trainer_that_ends_by_itself_is_noticed() -> None:
    trainer = TrainerProcess(
        SETUP, on_message=print, max_pending_bytes=10, command=(sys.executable, "-c", "raise SystemExit(3)")
    )
    trainer.resume()
    until(lambda: not trainer.is_alive)
    trainer.send(document())
    trainer.close()


def test_it_sees_the_end_of_the_connection_in_a_thread_of_its_own() -> None:
    """No thread is left when a trainer is closed."""
    trainer = start(Inbox())
    trainer.close()
    until(lambda: not any(thread.name.startswith("trainer_") for thread in threading.enumerate()))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs the parent-death signal of Linux")
@pytest.mark.parametrize("paused", [True, False])
def test_it_ends_with_a_killed_parent(tmp_path: Path, paused: bool) -> None:
    """The trainer's own code at its start, without its training."""
    child = tmp_path / "child.py"
    child.write_text(
        "import os, time\nfrom distill.online.__main__ import end_with\nend_with(os.getppid())\n"
        f"open({str(tmp_path / 'ready')!r}, 'w').close()\nwhile True: time.sleep(0.01)\n"
    )
    parent = tmp_path / "parent.py"
    parent.write_text(
        "import sys, time\nfrom pathlib import Path\n"
        "from engine.adaptation.messages import Setup\n"
        "from engine.adaptation.trainer_process import TrainerProcess\n"
        "setup = Setup(draft_folder='', target_folder='', versions_folder='', buffer_bytes=1, k=1)\n"
        f"command = (sys.executable, {str(child)!r})\n"
        "made = TrainerProcess(setup, on_message=print, max_pending_bytes=1, command=command)\n"
        "made.resume()\n"
        f"while not Path({str(tmp_path / 'ready')!r}).exists(): time.sleep(0.01)\n"
        + ("made.pause()\n" if paused else "")
        + "print(made.pid, flush=True)\ntime.sleep(600)\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, str(parent)], stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        trainer = psutil.Process(int(process.stdout.readline()))
        assert trainer.is_running()
        process.kill()
    until(lambda: not trainer.is_running() or trainer.status() == psutil.STATUS_ZOMBIE)


def test_its_priority_is_the_lowest() -> None:
    code = (
        "import os\nfrom distill.online.__main__ import take_lowest_priority\ntake_lowest_priority()\n"
        "print(os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0) == getattr(os, 'SCHED_IDLE', None))"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    niceness, is_idle = done.stdout.split()
    assert niceness == "19"
    assert is_idle == str(hasattr(os, "SCHED_IDLE"))


def test_the_default_command_is_a_module_that_needs_no_torch_to_lower_its_priority() -> None:
    code = "import sys, importlib; importlib.import_module('distill.online.__main__'); print('torch' in sys.modules)"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.strip() == "False"
    assert TRAINER[1:] == ("-m", "distill.online")
