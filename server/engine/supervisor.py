"""Keeps one engine alive: starts it, watches it, restarts it with back-off, ends it with all its processes.

The engine leads a session of its own, so neither a terminal's Ctrl-C nor the death of the gateway or of
this supervisor ends it. A supervisor that finds a living engine of its replica (it was itself killed and
started again) adopts it instead of starting a second one on the same socket.

Invariant: at most one supervisor a replica (a lock on ``run/REPLICA.lock``), at most one engine a
supervisor, and ``run/REPLICA.json`` names the engine that is alive now, under an instance id that no other
start ever had. No such file, or one that cannot be read: no engine.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import subprocess
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any, Self

import httpx
import msgspec

from server.engine import processes
from server.engine.launch import DRAIN_SECONDS, Launch

log = logging.getLogger(__name__)
START_SECONDS = 900.0
"""How long an engine may take until its first healthy answer (large weights, compilation)."""
POLL_SECONDS = 1.0
SICK_POLLS = 40
"""Consecutive failed health checks after which an engine that was healthy is restarted: about two minutes
at the time-out below, since an API process starved of its core by a prefill is not a dead one."""
BACKOFF_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
STEADY_SECONDS = 60.0
"""An engine that was healthy for this long starts again at the first back-off."""


class Busy(Exception):
    """Another supervisor holds this replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """Content of ``run/REPLICA.json``."""

    replica: str
    tier: str
    instance: str
    pid: int
    start_ticks: int
    """Kernel start time of `pid`, so that a recycled pid is not taken for the engine."""
    started_at: float
    socket: str
    supervisor: int


class Supervisor:
    """Runs one replica until it is told to stop (SIGTERM, SIGINT); SIGHUP starts its engine anew."""

    def __init__(self, replica_id: str, tier: str, plan: Launch) -> None:
        self._id, self._tier, self._plan = replica_id, tier, plan
        self._stopping = False
        self._restarting = False
        self._lock = self._take_lock()
        self._log: IO[bytes] = self._open_log()
        self._child: subprocess.Popen[bytes] | None = None
        self._client = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(plan.socket)), base_url="http://engine", timeout=2.0
        )

    def __enter__(self) -> Self:
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        signal.signal(signal.SIGHUP, self._start_anew)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()
        self._log.close()
        self._lock.close()

    def run(self) -> None:
        failures = 0
        while not self._stopping:
            state = self._adopt() or self._start()
            steady = self._watch(state)
            self._end(state)
            if self._stopping:
                return
            if self._restarting:
                self._restarting, failures = False, 0
                self._say(f"engine {state.instance} ended, as asked; starting another")
                continue
            failures = 0 if steady else failures + 1
            pause = BACKOFF_SECONDS[min(failures, len(BACKOFF_SECONDS) - 1)]
            self._say(f"engine {state.instance} ended; starting another in {pause:.0f} s")
            self._sleep(pause)

    def _start(self) -> EngineState:
        self._plan.socket.unlink(missing_ok=True)
        for note in self._plan.notes:
            self._say(note)
        self._say("starting: " + " ".join(self._plan.argv))
        self._child = subprocess.Popen(
            self._plan.argv,
            env=os.environ | self._plan.env,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        state = EngineState(
            replica=self._id,
            tier=self._tier,
            instance=uuid.uuid4().hex,
            pid=self._child.pid,
            start_ticks=processes.started_at(self._child.pid) or 0,
            started_at=time.time(),
            socket=str(self._plan.socket),
            supervisor=os.getpid(),
        )
        _write_atomically(self._plan.state_file, asdict(state))
        return state

    def _adopt(self) -> EngineState | None:
        """The engine that an earlier supervisor left, when it is alive; its remains are ended otherwise."""
        if self._child is not None:
            return None
        state = read_state(self._plan.state_file)
        if state is None:
            return None
        if processes.started_at(state.pid) != state.start_ticks:
            # The leader is gone; what it started may not be, and would hold memory and the socket.
            if processes.started_at(state.pid) is None:
                processes.end(state.pid, grace=0)
            self._plan.state_file.unlink(missing_ok=True)
            return None
        self._say(f"adopted engine {state.instance} (pid {state.pid})")
        return state

    def _watch(self, state: EngineState) -> bool:
        """Until the engine dies, is sick for too long, or is to end; whether it had been steady."""
        begun = time.monotonic()
        healthy_since: float | None = None
        failed = 0
        while not (self._stopping or self._restarting) and not processes.wait_gone(state.pid, POLL_SECONDS):
            if self._healthy():
                failed = 0
                if healthy_since is None:
                    healthy_since = time.monotonic()
                    self._say(f"engine {state.instance} ready after {healthy_since - begun:.1f} s")
                continue
            failed += 1
            if healthy_since is None and time.monotonic() - begun > START_SECONDS:
                self._say(f"engine {state.instance} did not become ready in {START_SECONDS:.0f} s")
                break
            if healthy_since is not None and failed >= SICK_POLLS:
                self._say(f"engine {state.instance} failed {failed} health checks")
                break
        return healthy_since is not None and time.monotonic() - healthy_since > STEADY_SECONDS

    def _healthy(self) -> bool:
        try:
            return self._client.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def _end(self, state: EngineState) -> None:
        processes.end(state.pid, grace=DRAIN_SECONDS + 5)
        if self._child is not None:
            self._say(f"engine {state.instance} exited with {self._child.wait()}")
        self._plan.state_file.unlink(missing_ok=True)
        self._plan.socket.unlink(missing_ok=True)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._stopping = True

    def _start_anew(self, number: int, frame: FrameType | None) -> None:
        self._restarting = True

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._stopping and time.monotonic() < deadline:
            time.sleep(0.1)

    def _say(self, text: str) -> None:
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} [{self._id}] {text}\n"
        self._log.write(line.encode())
        self._log.flush()

    def _take_lock(self) -> IO[bytes]:
        path = self._plan.state_file.with_suffix(".lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise Busy(f"replica {self._id} already has a supervisor ({path})") from None
        return lock

    def _open_log(self) -> IO[bytes]:
        self._plan.log_file.parent.mkdir(parents=True, exist_ok=True)
        return self._plan.log_file.open("ab")


def read_state(path: Path) -> EngineState | None:
    """What ``run/REPLICA.json`` says, None when there is no engine or the file cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=EngineState)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        log.warning("%s is not readable, so there is no engine: %s", path, error)
        return None


def _write_atomically(path: Path, content: dict[str, Any]) -> None:
    """Whole or not at all, also after a power cut: on disk before it takes the name."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
