"""Worker processes that form a gloo group, started once and used for many checks."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from datetime import timedelta
from pathlib import Path


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _work(rank, size, port, pipe):
    import torch

    from splitfg.distributed import connect

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    connect(device="cpu", timeout=timedelta(seconds=20))
    while True:
        task = pipe.recv()
        if task is None:
            return
        function, args = task
        try:
            pipe.send((True, function(rank, *args)))
        except Exception as error:
            pipe.send((False, (type(error).__name__, str(error), traceback.format_exc())))


class Crew:
    """Processes of one group. ``crew(function, *args)`` calls ``function(rank, *args)`` in each of them.

    Functions and their results travel by pickle between processes of one test, so functions are module-level.
    """

    def __init__(self, size):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["_crew_warm"])
        before = os.environ.get("PYTHONPATH", "")  # the server that is forked from searches there alone
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), before]))
        port, self.size = free_port(), size
        pairs = [context.Pipe() for _ in range(size)]
        self.pipes = [ours for ours, _ in pairs]
        self.processes = [
            context.Process(target=_work, args=(rank, size, port, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self.processes:
            process.start()
        os.environ["PYTHONPATH"] = before

    def outcomes(self, function, *args):
        """Return (whether it returned, result or (type, message, trace)) of every process."""
        for pipe in self.pipes:
            pipe.send((function, args))
        found = []
        for pipe in self.pipes:
            assert pipe.poll(120), "a process does not answer"
            found.append(pipe.recv())
        return found

    def __call__(self, function, *args):
        found = self.outcomes(function, *args)
        trouble = [result[2] for fine, result in found if not fine]
        assert not trouble, "\n".join(trouble)
        return [result for _, result in found]

    def errors(self, function, *args):
        """Return the type and the message of the error in every process."""
        found = self.outcomes(function, *args)
        assert not any(fine for fine, _ in found), found
        return [result[:2] for _, result in found]

    def close(self):
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
