"""`ratchet up`: the whole stack of one TOML on one machine; `ratchet demo`: the same with a demonstration.

prepare (one command after another) -> start every process -> wait until the gateway says it is ready ->
print how to call it -> watch until told to stop -> end everything.

One loop, one thread: it polls the children, asks the gateway, and moves the progress line. Invariant: one
`up` a home (a lock on ``run/up.lock``), and ``run/up.json`` names the processes that are alive now, so that
the next `up` can end what a killed one left behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from clients import processes
from clients.deployment import Deployment, DeploymentError
from clients.processes import Watched

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
RECORD = Path("run/up.json")
LOCK = Path("run/up.lock")
POLL_S = 0.2
READY_S = 900.0
"""A first start builds nothing (prepare does), but large weights take minutes to load."""
GRACE_S = 45.0
"""An engine drains its requests before it ends."""
ENTRY = """
[bold]Ratchet is up.[/bold] In another terminal:

  export OPENAI_BASE_URL={url}
  export OPENAI_API_KEY={key}

Models: {models}   Logs: {logs}   Ctrl-C ends everything.
"""
SNIPPET = """
from openai import OpenAI

answer = OpenAI().chat.completions.create(
    model="{model}",
    messages=[{{"role": "user", "content": "Say hello."}}],
)
print(answer.model, answer.choices[0].message.content)
"""


class UpError(Exception):
    """The stack cannot start or go on; the message says what to do or which log to read."""


class _Stopped(BaseException):
    """A signal asked for the end. Not an Exception, so that nothing on the way handles it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _Stop:
    """The handler of the stop signals. It raises where the program is; that can be a place where Python drops
    exceptions (a finalizer, say), so it also remembers, and the loops ask."""

    def __init__(self) -> None:
        self.number: int | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        raise _Stopped(number)

    def check(self) -> None:
        if self.number is not None:
            raise _Stopped(self.number)


def up(deployment: Deployment) -> int:
    """Run the stack until Ctrl-C or SIGTERM. 0 after a stop that was asked for."""
    try:
        return _run(deployment, lambda stack: stack.watch(until=None))
    except _Stopped:
        return 0


def demo(deployment: Deployment, arguments: list[str]) -> int:
    """Run the stack and the demonstration against it; its exit code, 128 + N after signal N."""

    def body(stack: Stack) -> int:
        child = subprocess.Popen(
            [*deployment.command("rollout", "demo"), *arguments],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=processes.bind_to_parent,
        )
        stack.extra.append(child)
        return stack.watch(until=child)

    try:
        return _run(deployment, body, empty=deployment.disposable)
    except _Stopped as stopped:
        return 128 + stopped.number


def _run(deployment: Deployment, body: Callable[[Stack], int], empty: bool = False) -> int:
    console = Console(highlight=False, soft_wrap=True)
    stop = _Stop()
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)
    try:
        if not deployment.processes:
            raise UpError(
                f"{deployment.config} names no [[up.process]]; start its processes where they belong"
            )
        with _only_one(deployment.home):
            _check_port(deployment)
            _end_earlier(deployment.home, console)
            if empty:
                _empty(deployment.home)
            processes.adopt_orphans()
            stack = Stack(deployment, console, stop)
            try:
                stack.prepare()
                stack.start()
                return body(stack)
            finally:
                stack.stop()
    except (UpError, DeploymentError) as error:
        console.print(f"[red]ratchet:[/red] {escape(str(error))}")
        return 1


class Stack:
    """The processes of one deployment."""

    def __init__(self, deployment: Deployment, console: Console, stop: _Stop) -> None:
        self.deployment = deployment
        self.console = console
        self._stop = stop
        self.watched = [Watched(spec) for spec in deployment.processes]
        self.extra: list[subprocess.Popen[bytes]] = []
        """Children that run once: prepare commands, the demonstration."""
        self._record = deployment.home / RECORD
        self._complained: set[str] = set()

    def prepare(self) -> None:
        """Run the `prepare` commands one after another, their output as it comes."""
        commands = self.deployment.prepare
        for number, argv in enumerate(commands, 1):
            shown = " ".join(argv[1:]) if argv[0] == sys.executable else " ".join(argv)
            self.console.print(f"[bold]prepare {number}/{len(commands)}[/bold] {escape(shown)}")
            child = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=processes.bind_to_parent
            )
            self.extra.append(child)
            if code := child.wait():
                raise UpError(f"this step ended with exit code {code}: {shown}")

    def start(self) -> None:
        """Start every process and wait until the gateway answers that every tier is ready."""
        for watched in self.watched:
            watched.start()
        self._write_record()
        begun = time.monotonic()
        with _progress(self.console) as show:
            while True:
                self._poll(ready=False)
                ready, waiting_for = _health(self.deployment.host, self.deployment.port)
                if ready:
                    break
                if time.monotonic() - begun > READY_S:
                    raise UpError(f"not ready after {READY_S:.0f} s ({waiting_for}); {self._logs()}")
                show(waiting_for, time.monotonic() - begun)
                time.sleep(POLL_S)
        self.console.print(f"ready after {time.monotonic() - begun:.0f} s")
        self._print_entry()

    def watch(self, until: subprocess.Popen[bytes] | None) -> int:
        """Keep the processes running; returns when `until` ends, with its exit code."""
        while until is None or until.poll() is None:
            self._poll(ready=True)
            time.sleep(POLL_S)
        return until.returncode

    def stop(self) -> None:
        """End every process this stack began. A second Ctrl-C does not interrupt it."""
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        self.console.print("ending every process")
        running = [watched.process for watched in reversed(self.watched) if watched.process is not None]
        processes.end_all([*self.extra, *running], GRACE_S)
        self._record.unlink(missing_ok=True)

    def _poll(self, ready: bool) -> None:
        self._stop.check()
        before = [watched.process for watched in self.watched]
        for watched in self.watched:
            code = watched.poll()
            name = watched.spec.name
            if code is not None:
                self.console.print(f"[yellow]{name} ended with exit code {code}[/yellow]; starting it again")
            if watched.hopeless and name not in self._complained:
                message = f"{name} failed {watched.quick_failures} times in a row; read {watched.spec.log}"
                if not ready:
                    raise UpError(f"{message}\n{_tail(watched.spec.log)}")
                self.console.print(f"[red]{escape(message)}[/red] (still trying, once a minute)")
                self._complained.add(name)
        if before != [watched.process for watched in self.watched]:
            self._write_record()

    def _write_record(self) -> None:
        alive = [watched.process.pid for watched in self.watched if watched.process is not None]
        temporary = self._record.with_suffix(".tmp")
        temporary.write_text(json.dumps({pid: processes.start_time(pid) for pid in alive}))
        temporary.replace(self._record)

    def _print_entry(self) -> None:
        deployment = self.deployment
        try:
            key = deployment.key_file.read_text().strip()
        except FileNotFoundError:
            raise UpError(f"{deployment.key_file} is missing; `prepare` should have made it") from None
        self.console.print(
            ENTRY.format(
                url=deployment.base_url, key=key, models=", ".join(deployment.model_names), logs=self._logs()
            )
        )
        # To be copied as it is: no colours, no wrapping, no indentation.
        self.console.out(SNIPPET.format(model=deployment.model_names[0]), highlight=False)

    def _logs(self) -> str:
        return str(self.deployment.home / "logs")


@contextlib.contextmanager
def _only_one(home: Path) -> Iterator[None]:
    """Hold the lock of `home`; raises UpError when another `up` does."""
    (home / LOCK).parent.mkdir(parents=True, exist_ok=True)
    with (home / LOCK).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise UpError(
                f"{home} is already up (process {lock.read().strip()}); end that one first"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def _end_earlier(home: Path, console: Console) -> None:
    """End what an `up` that was killed has left: its record names the processes."""
    if not (home / RECORD).exists():
        return
    try:
        recorded = {int(pid): started for pid, started in json.loads((home / RECORD).read_text()).items()}
    except (ValueError, AttributeError):  # torn, or no record at all
        console.print(f"{home / RECORD} cannot be read; processes of an earlier run may be left")
        return
    if left := processes.end_left_over(recorded, GRACE_S):
        console.print(f"ended {len(left)} processes of an earlier run")


def _empty(home: Path) -> None:
    """Remove everything of `home` except the lock we hold. Only a home that a demonstration made."""
    marker = home / "disposable"
    if not marker.exists() and any(entry != (home / LOCK).parent for entry in home.iterdir()):
        raise UpError(
            f"{home} was not made by a demonstration; it is left as it is. Choose another home.path"
        )
    for entry in home.iterdir():
        if entry.is_symlink() or entry.is_file():
            entry.unlink()
        elif entry != (home / LOCK).parent:
            shutil.rmtree(entry)
    for entry in (home / LOCK).parent.iterdir():
        if entry != home / LOCK:
            entry.unlink()
    marker.touch()


def _check_port(deployment: Deployment) -> None:
    with socket.socket(socket.AF_INET6 if ":" in deployment.host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((deployment.host, deployment.port))
        except OSError as error:
            raise UpError(
                f"cannot listen on {deployment.host}:{deployment.port} ({error.strerror}); "
                "choose another port with --set gateway.port=N"
            ) from None


def _health(host: str, port: int) -> tuple[bool, str]:
    """Whether every tier is ready, and in a few words what is not."""
    connection = http.client.HTTPConnection("127.0.0.1" if host in ("", "0.0.0.0") else host, port, timeout=2)
    try:
        connection.request("GET", "/healthz")
        response = connection.getresponse()
        body: dict[str, Any] = json.loads(response.read())
    except (OSError, http.client.HTTPException):
        return False, "the gateway does not answer yet"
    finally:
        connection.close()
    waiting = [
        f"{replica}: {why}"
        for tier in body.get("tiers", {}).values()
        for replica, why in tier.get("why_not", {}).items()
    ]
    return response.status == 200, "; ".join(waiting) or str(body.get("status"))


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[Callable[[str, float], None]]:
    """A live line on a terminal; elsewhere a line whenever the text changes."""
    last = ""

    def show_line(text: str, seconds: float) -> None:
        nonlocal last
        if text != last:
            console.print(f"{seconds:4.0f} s  {escape(text)}")
            last = text

    if not console.is_terminal:
        yield show_line
        return
    with Status("starting", console=console) as status:
        yield lambda text, seconds: status.update(f"{seconds:.0f} s  {escape(text)}")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:]) if log.exists() else ""
