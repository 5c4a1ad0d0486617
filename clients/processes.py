"""Child processes of `ratchet up`: started in groups of their own, watched, restarted, ended.

Invariant: whatever `Watched.start` began is gone when `end_all` returns, also what left its group (a child
that outlives its parent is handed to this process, see `adopt_orphans`), and the kernel ends the direct
children when this process dies by any cause.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
QUICK_S = 30.0
"""A process that ends sooner than this after its start has failed quickly."""
QUICK_FAILURES = 5
"""So many quick failures in a row and waiting longer will not help: somebody has to read the log."""
LONGEST_DELAY_S = 60.0
LOG_LIMIT = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One process as the TOML names it, placeholders filled in."""

    name: str
    argv: list[str]
    env: dict[str, str]
    nice: int
    log: Path


@dataclass(slots=True)
class Watched:
    """A process that is started again, later each time, until it is told to stop."""

    spec: Spec
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    quick_failures: int = 0
    due_at: float = 0.0
    """Monotonic time of the next start while no process runs."""
    exit_codes: list[int] = field(default_factory=list)

    def start(self) -> None:
        self.process = spawn(self.spec)
        self.started_at = time.monotonic()

    def poll(self) -> int | None:
        """Notice an exit (returns its code, once) or start again when that is due."""
        now = time.monotonic()
        if self.process is None:
            if now >= self.due_at:
                self.start()
            return None
        code = self.process.poll()
        if code is None:
            return None
        _signal_group(self.process.pid, signal.SIGKILL)
        self.process = None
        self.exit_codes.append(code)
        self.quick_failures = self.quick_failures + 1 if now - self.started_at < QUICK_S else 1
        self.due_at = now + min(2.0 ** (self.quick_failures - 1), LONGEST_DELAY_S)
        return code

    @property
    def hopeless(self) -> bool:
        return self.quick_failures >= QUICK_FAILURES


def spawn(spec: Spec) -> subprocess.Popen[bytes]:
    """Start `spec` in a session of its own, output appended to its log."""
    spec.log.parent.mkdir(parents=True, exist_ok=True)
    if spec.log.exists() and spec.log.stat().st_size > LOG_LIMIT:
        spec.log.replace(spec.log.with_suffix(".log.1"))
    with spec.log.open("ab") as log:
        return subprocess.Popen(
            spec.argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **spec.env},
            start_new_session=True,
            preexec_fn=lambda: bind_to_parent(spec.nice),
        )


def bind_to_parent(nice: int = 0) -> None:
    """In the child, before exec: SIGTERM when the parent dies, however it dies."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if nice:
        os.nice(nice)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies, so that `end_all` still finds them."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_all(processes: Iterable[subprocess.Popen[bytes]], grace_s: float) -> None:
    """SIGTERM to every group, `grace_s` for all to end, then SIGKILL to whatever is left."""
    processes = [process for process in processes if process.poll() is None]
    family = descendants(os.getpid())
    for process in processes:
        _signal_group(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    for process in processes:
        try:
            process.wait(max(deadline - time.monotonic(), 0.01))
        except subprocess.TimeoutExpired:
            continue
    for process in processes:
        _signal_group(process.pid, signal.SIGKILL)
    for pid, started in {**family, **descendants(os.getpid())}.items():
        if start_time(pid) == started:
            _signal(pid, signal.SIGKILL)
    for process in processes:
        process.wait()


def descendants(root: int) -> dict[int, int]:
    """Living descendants of `root`: pid -> start time, which together name a process for good."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            parents[int(entry.name)] = int(fields[1])
    found: dict[int, int] = {}
    frontier = {root}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier}
        for pid in frontier:
            if (started := start_time(pid)) is not None:
                found[pid] = started
    return found


def start_time(pid: int) -> int | None:
    """Clock ticks after boot at which `pid` began; None when it is gone or a zombie."""
    fields = _stat(pid)
    return int(fields[19]) if fields and fields[0] != "Z" else None


def end_left_over(recorded: dict[int, int | None], grace_s: float) -> list[int]:
    """End the groups that an earlier run recorded and left; returns their pids.

    Pid -> start time, None for a process that had ended before it was recorded.
    """
    alive = [pid for pid, started in recorded.items() if started is not None and start_time(pid) == started]
    for sent in (signal.SIGTERM, signal.SIGKILL):
        for pid in alive:
            if start_time(pid) == recorded[pid]:
                _signal_group(pid, sent)
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and any(start_time(pid) == recorded[pid] for pid in alive):
            time.sleep(0.1)
    return alive


def _stat(pid: int) -> list[str] | None:
    """/proc/PID/stat after the command name: state, parent, ..., start time at index 19."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


def _signal_group(pid: int, sent: int) -> None:
    try:
        os.killpg(pid, sent)
    except ProcessLookupError:
        return


def _signal(pid: int, sent: int) -> None:
    try:
        os.kill(pid, sent)
    except ProcessLookupError:
        return


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
