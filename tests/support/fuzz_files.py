"""Many mutated files for each reader of model files: `make fuzz-files ARGS='--num 100000 --readers gguf awq'`.

Owns the child process of each reader, whose memory is bounded, and the report. A crash ends the child;
it is counted with its seed, and the next child goes on. The same seeds give the same files. Status 1 if a case
breaks the promise of `mutated_readers`.
"""

from __future__ import annotations

import argparse
import os
import resource
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from mmap import PAGESIZE, mmap
from pathlib import Path

import torch
from mutated_readers import READERS, Reader, run_case

from engine.model.device import release_freed_memory

SPARE_BYTES = 64 << 20
"""Memory that a child may take beyond what it has when its reader is ready. The files have at most 2 MB."""
SHOWN_FAILURES = 20


@dataclass
class Outcome:
    """What became of the cases of one reader."""

    counts: Counter[str] = field(default_factory=Counter)
    """Cases that were `read`, `refused` or `failed`."""
    failures: list[str] = field(default_factory=list)
    grown_bytes: int = 0
    """Largest growth of resident memory."""


def main(arguments: list[str] | None = None) -> int:
    """Run the readers; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num", type=int, default=100_000, help="files for each reader")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--readers", nargs="+", choices=list(READERS), default=list(READERS))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    all_kept = True
    for name in options.readers:
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as root:
            outcome = fuzz(
                name, READERS[name](Path(root)), Path(root), range(options.first, options.first + options.num)
            )
        counts = ", ".join(f"{outcome.counts[kind]} {kind}" for kind in ("read", "refused", "failed"))
        grown = f"{outcome.grown_bytes / 1e6:.0f} MB at most beyond the reader's own"
        print(f"{name}: {options.num} files, {counts}, {grown}, {time.monotonic() - begin:.0f} s", flush=True)
        for failure in outcome.failures[:SHOWN_FAILURES]:
            print(f"  {failure}", flush=True)
        all_kept = all_kept and not outcome.counts["failed"]
    return 0 if all_kept else 1


def fuzz(name: str, reader: Reader, root: Path, seeds: range) -> Outcome:
    """All cases of a reader, in children.

    Args:
        name: of the reader, part of each seed.
        reader: makes the cases.
        root: folder for the files.
        seeds: of the cases.
    """
    outcome, folder = Outcome(), root / "mutated"
    folder.mkdir()
    first = seeds.start
    while first < seeds.stop:
        with mmap(-1, PAGESIZE) as board, tempfile.TemporaryFile("w+") as failures:
            child = os.fork()
            if child == 0:
                try:
                    _run(name, reader, folder, range(first, seeds.stop), board, failures.fileno())
                finally:
                    os._exit(0)
            _, status = os.waitpid(child, 0)
            first, num_read, num_refused, num_failed, grown_kb = _BOARD.unpack_from(board)
            failures.seek(0)
            outcome.failures += failures.read().splitlines()
        outcome.counts.update(read=num_read, refused=num_refused, failed=num_failed)
        outcome.grown_bytes = max(outcome.grown_bytes, 1024 * grown_kb)
        if first < seeds.stop:
            outcome.counts.update(failed=1)
            outcome.failures.append(f"seed {first}: the process ended with {os.waitstatus_to_exitcode(status)}")
            first += 1
    return outcome


_BOARD = struct.Struct("5q")
"""Shared with the child: seed in progress or the end, cases read, refused and failed, growth in KiB."""


def _run(name: str, reader: Reader, folder: Path, seeds: range, board: mmap, failures: int) -> None:
    release_freed_memory()  # What the parent has freed would be beyond the limit.
    data = int(Path("/proc/self/statm").read_text().split()[5]) * PAGESIZE
    resource.setrlimit(resource.RLIMIT_DATA, (data + SPARE_BYTES, data + SPARE_BYTES))
    at_start = int(Path("/proc/self/statm").read_text().split()[1]) * PAGESIZE // 1024
    num_read = num_refused = num_failed = 0
    for seed in (*seeds, seeds.stop):
        grown = max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - at_start)
        _BOARD.pack_into(board, 0, seed, num_read, num_refused, num_failed, grown)
        if seed == seeds.stop:
            return
        try:
            if run_case(reader, folder, f"{name} {seed}"):
                num_read += 1
            else:
                num_refused += 1
        except Exception as error:  # noqa: BLE001 - the search goes on; the case is in the report
            num_failed += 1
            place = traceback.extract_tb(error.__traceback__)[-1]
            text = f"seed {seed}: {type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
            os.write(failures, (" ".join(text.split())[:300] + "\n").encode())


if __name__ == "__main__":
    sys.exit(main())
