"""Sessions of processes as the kernel tells them: who belongs to an engine, is it alive, end it.

vLLM is a tree of processes (API, engine core, workers). They share the session that the first one leads,
also after it died, so the session is what is watched and ended.
"""

from __future__ import annotations

import os
import select
import signal
import time
from pathlib import Path


def started_at(pid: int) -> int | None:
    """Clock ticks after boot at which `pid` started, None when it is gone or a zombie.

    Together with the pid this names one process for as long as the machine is up.
    """
    fields = _stat(pid)
    return None if fields is None or fields[0] == "Z" else int(fields[19])


def members(session: int) -> list[int]:
    """Living processes whose session is `session`."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        fields = _stat(int(entry.name))
        if fields is not None and fields[0] != "Z" and int(fields[3]) == session:
            found.append(int(entry.name))
    return found


def end(session: int, *, grace: float) -> None:
    """SIGTERM to the leader of `session`, then SIGKILL to whatever is left of it after `grace` seconds."""
    if started_at(session) is not None:
        _signal(session, signal.SIGTERM)
        wait_gone(session, grace)
    deadline = time.monotonic() + 30
    while left := members(session):
        for pid in left:
            _signal(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {left} of session {session} do not die")
        time.sleep(0.05)


def wait_gone(pid: int, seconds: float) -> bool:
    """Wait until `pid` has exited (a zombie counts), at most `seconds`; whether it has."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], seconds)[0])
    finally:
        os.close(handle)


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on (proc(5): state is 3rd, session 6th, starttime 22nd)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command, in parentheses, may itself hold spaces and parentheses.
    return text.rpartition(")")[2].split()


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
