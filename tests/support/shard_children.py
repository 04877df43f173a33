"""Code of the child processes in the tensor-parallel tests: one rank each, over gloo on loopback."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from engine.core.step import ForwardInput
from engine.errors import ShardDown
from engine.model.collectives import Group, open_store
from engine.model.load import load_model
from engine.model.runner import ModelRunner

CPU = torch.device("cpu")


def run_ranks(target: Callable[..., None], size: int, *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Run target(rank, size, port, connection, *args) in `size` processes.

    Returns:
        What each rank sent: None for one that died, "hung" for one that sent nothing in time.
    """
    context = multiprocessing.get_context("spawn")
    store = open_store(size=size, master=True)
    pipes = [context.Pipe() for _ in range(size)]
    processes = [
        context.Process(target=target, args=(rank, size, store.port, pipes[rank][1], *args), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for _, theirs in pipes:
        theirs.close()
    deadline = time.monotonic() + timeout_s
    results = []
    for ours, _ in pipes:
        try:
            results.append(ours.recv() if ours.poll(max(0.0, deadline - time.monotonic())) else "hung")
        except EOFError:
            results.append(None)
    for process in processes:
        process.join(1)
        if process.is_alive():
            process.kill()
    return results


def logits_of_models(
    rank: int,
    size: int,
    port: int,
    connection: Connection,
    models: Sequence[tuple[Path, Sequence[ForwardInput], int]],
) -> None:
    """Send the logits (or None) of each forward input. A model is given as (folder, forward inputs, block size)."""
    torch.set_num_threads(1)
    group = Group.connect(
        rank=rank, size=size, store=open_store(port=port, size=size, master=False), device=CPU, timeout_s=50
    )
    sent = []
    for folder, forward_inputs, block_size in models:
        runner = ModelRunner(
            load_model(folder, dtype=torch.float32, collectives=group), num_blocks=128, block_size=block_size
        )
        results = [runner.forward(forward_input).logits for forward_input in forward_inputs]
        sent.append([None if logits is None else logits.numpy() for logits in results])
    connection.send(sent)
    group.close()


def collective_values(rank: int, size: int, port: int, connection: Connection) -> None:
    """Sum and gather in two groups of different dtype, and send the results as lists."""
    store = open_store(port=port, size=size, master=False)
    first = Group.connect(rank=rank, size=size, store=store, device=CPU, timeout_s=30, name="first")
    second = Group.connect(rank=rank, size=size, store=store, device=CPU, timeout_s=30, name="second")
    sent: dict[str, Any] = {}
    for name, group, dtype in (("fp32", first, torch.float32), ("bf16", second, torch.bfloat16)):
        total = torch.full((3, 5), rank + 1.0, dtype=dtype)
        group.all_reduce(total)
        columns = [2] * (size - 1) + [1]
        local = torch.full((2, columns[rank]), float(rank), dtype=dtype)
        gathered = group.gather_logits(local, columns)
        sent[name] = (total.tolist(), None if gathered is None else gathered.tolist())
    connection.send(sent)
    first.close()
    second.close()


def lose_a_peer(rank: int, size: int, port: int, connection: Connection, how: str, timeout_s: float) -> None:
    """The last rank dies or hangs before the second sum. The others send the error they got, and after how long."""
    group = Group.connect(
        rank=rank, size=size, store=open_store(port=port, size=size, master=False), device=CPU, timeout_s=timeout_s
    )
    group.all_reduce(torch.ones(4))
    if rank == size - 1:
        connection.send("lost")
        if how == "hangs":
            time.sleep(60)
        return
    started = time.monotonic()
    try:
        group.all_reduce(torch.ones(4))
        seen = "nothing"
    except ShardDown:
        seen = "ShardDown"
    connection.send((seen, time.monotonic() - started))
