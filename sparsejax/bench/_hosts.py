"""Several hosts on one machine: network namespaces joined by links of limited rate."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence

_PORT = 9917
_SUBNET = "10.77.0"


class HostsError(RuntimeError):
    """Raised if hosts could not be made; the message names the missing part."""


def run_on_hosts(
    count: int, rate: str, command: Sequence[str], *, timeout: float = 3600.0
) -> int:
    """Runs `command` on each of `count` hosts, and prints the output of the first.

    Each host is a network namespace with its own address, name and link; the link is
    limited to `rate` in both directions. A host has as many threads as its share of
    the machine's cores. jax finds the other processes through
    `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`.

    Args:
      count: the number of hosts, from 1 to 200.
      rate: bit rate in the syntax of `tc`, such as "1gbit"; "none" for unlimited.
      command: the command to run; it needs no option for the hosts.
      timeout: seconds after which all hosts are ended.

    Returns:
      0, or the exit status of the first host that failed.

    Raises:
      HostsError: without root, `ip` or `tc`, or for a count out of range or a rate
        that `tc` refuses.
    """
    if not 1 <= count <= 200:
        raise HostsError(f"--hosts: got {count}, expected 1 to 200.")
    if os.geteuid() != 0:
        raise HostsError("--hosts: network namespaces need root.")
    for tool in ("ip", "tc"):
        if not shutil.which(tool):
            raise HostsError(f"--hosts: `{tool}` is missing; install iproute2.")
    with _network(count, rate) as namespaces, tempfile.TemporaryDirectory() as folder:
        logs = [pathlib.Path(folder, f"host{i}") for i in range(count)]
        processes = []
        try:
            for i, (namespace, log) in enumerate(zip(namespaces, logs, strict=True)):
                processes.append(_start(i, count, namespace, command, log))
            statuses = [_wait(p, timeout) for p in processes]
        finally:
            for process in processes:
                _end(process)
        sys.stdout.write(logs[0].read_text())
        for i, status in enumerate(statuses):
            if status:
                sys.stderr.write(f"host {i} failed:\n{logs[i].read_text()[-4000:]}\n")
        return next((status for status in statuses if status), 0)


def _start(index, count, namespace, command, log):
    environment = {
        **os.environ,
        "JAX_COORDINATOR_ADDRESS": f"{_SUBNET}.1:{_PORT}",
        "JAX_NUM_PROCESSES": str(count),
        "JAX_PROCESS_ID": str(index),
        # XLA's number of threads. By default each host would use every core.
        "NPROC": str(max(1, len(os.sched_getaffinity(0)) // count)),
    }
    with log.open("w") as output:
        return subprocess.Popen(
            ["ip", "netns", "exec", namespace, *command],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait(process: subprocess.Popen, timeout: float) -> int:
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return 124


def _end(process: subprocess.Popen) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def _network(count: int, rate: str) -> Iterator[list[str]]:
    """Makes a bridge with `count` namespaces, and removes them at the end."""
    tag = f"sj{os.getpid() % 100000}"
    names = [f"{tag}h{i}" for i in range(count)]
    try:
        _ip(f"link add {tag} type bridge")
        _ip(f"link set {tag} up")
        for i, name in enumerate(names):
            outer = f"{tag}v{i}"
            _ip(f"netns add {name}")
            _ip(f"link add {outer} type veth peer name eth0 netns {name}")
            _ip(f"link set {outer} master {tag} up")
            _ip(f"-n {name} addr add {_SUBNET}.{i + 1}/24 dev eth0")
            _ip(f"-n {name} link set eth0 up")
            _ip(f"-n {name} link set lo up")
            _limit(["ip", "netns", "exec", name], "eth0", rate)
            _limit([], outer, rate)
            _name_hosts(name, count)
        yield names
    finally:
        for i, name in enumerate(names):
            _ip(f"netns del {name}", check=False)
            _ip(f"link del {tag}v{i}", check=False)
            shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)
        _ip(f"link del {tag}", check=False)


def _name_hosts(namespace: str, count: int) -> None:
    """gloo looks up the host's own name to find the interface to use."""
    folder = pathlib.Path("/etc/netns", namespace)
    folder.mkdir(parents=True, exist_ok=True)
    own = int(namespace.rsplit("h", 1)[1])
    lines = ["127.0.0.1 localhost", f"{_SUBNET}.{own + 1} {os.uname().nodename}"]
    lines += [f"{_SUBNET}.{i + 1} host{i}" for i in range(count)]
    (folder / "hosts").write_text("\n".join(lines) + "\n")


def _limit(prefix: list[str], device: str, rate: str) -> None:
    if rate != "none":
        shape = f"tc qdisc add dev {device} root tbf rate {rate} burst 512kb"
        _run([*prefix, *shape.split(), "latency", "100ms"])


def _ip(arguments: str, *, check: bool = True) -> None:
    _run(["ip", *arguments.split()], check=check)


def _run(command: list[str], *, check: bool = True) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if check and done.returncode:
        raise HostsError(
            f"--hosts: `{' '.join(command)}` failed: {done.stderr.strip()}"
        )
