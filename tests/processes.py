"""Starts a program as several processes that find each other, and ends them again."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import NamedTuple

from tests import quick
from tests.pages import ROOT


class Result(NamedTuple):
    """The result of a process: its exit status, and its unread output."""

    status: int
    output: str
    errors: str


class Process:
    """A running Python program.

    The errors go to a file: a full pipe would stop this program and all the others.
    """

    def __init__(self, arguments: tuple[str, ...], environment: dict[str, str]):
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (see close)
        self._popen = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def lines(self) -> Iterator[str]:
        """The lines that the program prints, while the program runs."""
        for line in self._popen.stdout:
            yield line.rstrip("\n")

    def wait_for(self, line: str) -> None:
        """Reads on until the program has printed `line`."""
        if line not in self.lines():
            raise AssertionError(f"ended without {line!r}: {self.result().errors}")

    def send(self, signal: int) -> None:
        self._popen.send_signal(signal)

    def kill(self) -> None:
        self._popen.kill()

    def result(self) -> Result:
        """Waits until the program ends."""
        output = self._popen.stdout.read()
        status = self._popen.wait()
        self._errors.seek(0)
        return Result(status, output, self._errors.read())

    def output(self) -> str:
        """Waits until the program ends without an error; returns its unread output."""
        status, output, errors = self.result()
        assert status == 0, f"exit status {status}: {errors[-4000:]}"
        return output

    def close(self) -> None:
        self.kill()
        self._popen.wait()
        self._popen.stdout.close()
        self._errors.close()


@contextlib.contextmanager
def running(
    *arguments: str, processes: int = 1, devices: int = 8, timeout: float = 300.0
) -> Iterator[list[Process]]:
    """Runs Python programs on the CPU, and ends them with the `with` block.

    Several processes get `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and
    `JAX_PROCESS_ID`, as in the README.

    Args:
      *arguments: for Python: `"-m"` and a module, or `"-c"` and a text, and more.
      processes: the number of processes.
      devices: virtual devices of each process.
      timeout: seconds after which all processes are killed, so no test waits for their
        output forever.
    """
    environment = quick.environment(devices)
    if processes > 1:
        environment["JAX_COORDINATOR_ADDRESS"] = f"localhost:{_free_port()}"
        environment["JAX_NUM_PROCESSES"] = str(processes)
    with contextlib.ExitStack() as stack:
        started = []
        for i in range(processes):
            index = {"JAX_PROCESS_ID": str(i)} if processes > 1 else {}
            started.append(Process(arguments, environment | index))
            stack.callback(started[-1].close)
        timer = threading.Timer(timeout, lambda: [p.kill() for p in started])
        stack.callback(timer.cancel)
        timer.start()
        yield started


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]
