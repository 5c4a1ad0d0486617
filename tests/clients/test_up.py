"""`ratchet up` on small real processes: a stand-in gateway that answers /healthz, helpers that misbehave."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clients import processes

GATEWAY = """
import http.server, json, pathlib, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        ready = pathlib.Path(sys.argv[2]).exists()
        body = json.dumps({"status": "ok", "tiers": {"standard": {"ready": ready, "replicas": 1}}}).encode()
        self.send_response(200 if ready else 503)
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
LEAVES_A_CHILD = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open(sys.argv[1], "w").write("ready")
time.sleep(600)
"""


class Home:
    """One small deployment in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "stack.toml"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]

    def write(self, *extra: str, prepare: str = "") -> None:
        key = f"open('{self.folder}/dev.key', 'w').write('sk-test')"
        tables = [
            f"[home]\npath = '{self.folder}'",
            f"[gateway]\nport = {self.port}",
            "[tiers.standard]\nrecipe = 'float32'",
            f'[up]\nprepare = [["{{python}}", "-c", "{key}"]{prepare}]',
            process("gateway", GATEWAY, str(self.port), "{home}/ready"),
            process("engine", LEAVES_A_CHILD, "{home}/ready"),
            *extra,
        ]
        self.config.write_text("\n".join(tables))

    @contextlib.contextmanager
    def start(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        command = [sys.executable, "-m", "clients.cli", *arguments, "--config", str(self.config)]
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=_hears_ctrl_c,
        ) as ratchet:
            try:
                yield ratchet
            finally:
                ratchet.kill()

    def read_until(self, ratchet: subprocess.Popen[str], text: str) -> str:
        assert ratchet.stdout is not None
        seen = ""
        for line in ratchet.stdout:
            seen += line
            if text in line:
                return seen
        raise AssertionError(f"ended without {text!r}:\n{seen}")


def _hears_ctrl_c() -> None:
    """In the child: a test run in the background has SIGINT ignored, and `up` would leave it so."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def process(name: str, code: str, *arguments: str) -> str:
    argv = json.dumps(["{python}", "-c", code, *arguments])
    return f'[[up.process]]\nname = "{name}"\nargv = {argv}'


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def test_prints_what_to_export_and_leaves_nothing_behind(home: Home) -> None:
    home.write()
    with home.start("up") as ratchet:
        seen = home.read_until(ratchet, "print(answer.model")
        assert f"export OPENAI_BASE_URL=http://127.0.0.1:{home.port}/v1" in seen
        assert "export OPENAI_API_KEY=sk-test" in seen
        snippet = seen[seen.index("from openai import") :]
        compile(snippet, "snippet", "exec")
        family = processes.descendants(ratchet.pid)
        assert len(family) >= 3
        ratchet.send_signal(signal.SIGINT)
        assert ratchet.wait(30) == 0
    assert [pid for pid, started in family.items() if processes.start_time(pid) == started] == []
    assert not (home.folder / "run" / "up.json").exists()


def test_children_end_when_up_is_killed_and_the_next_up_starts(home: Home) -> None:
    home.write()
    with home.start("up") as ratchet:
        home.read_until(ratchet, "print(answer.model")
        recorded = json.loads((home.folder / "run" / "up.json").read_text())
        assert len(recorded) == 2
        ratchet.kill()
        ratchet.wait(30)
        until(lambda: all(processes.start_time(int(pid)) is None for pid in recorded))
    with home.start("up") as ratchet:
        home.read_until(ratchet, "print(answer.model")
        ratchet.terminate()
        assert ratchet.wait(30) == 0


@pytest.mark.parametrize("record", ["", "[]", '{"1', '{"a": 1}', '{"999999": null}'])
def test_an_earlier_record_that_is_of_no_use_does_not_keep_up_from_starting(home: Home, record: str) -> None:
    home.write()
    (home.folder / "run").mkdir()
    (home.folder / "run" / "up.json").write_text(record)
    with home.start("up") as ratchet:
        home.read_until(ratchet, "print(answer.model")
        ratchet.terminate()
        assert ratchet.wait(30) == 0


def test_what_was_dead_when_it_was_recorded_is_not_waited_for() -> None:
    begun = time.monotonic()
    assert processes.end_left_over({999_999: None}, grace_s=30.0) == []
    assert time.monotonic() - begun < 5


def test_a_second_up_on_the_same_home_is_refused(home: Home) -> None:
    home.write()
    with home.start("up") as first:
        home.read_until(first, "print(answer.model")
        with home.start("up") as second:
            assert f"is already up (process {first.pid})" in home.read_until(second, "already up")
            assert second.wait(30) == 1
        first.terminate()
        assert first.wait(30) == 0


def test_a_taken_port_is_named(home: Home) -> None:
    home.write()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", home.port))
        taken.listen()
        with home.start("up") as ratchet:
            assert "--set gateway.port=N" in home.read_until(ratchet, f"127.0.0.1:{home.port}")
            assert ratchet.wait(30) == 1


def test_a_failing_prepare_step_stops_the_start(home: Home) -> None:
    home.write(prepare=', ["{python}", "-c", "raise SystemExit(3)"]')
    with home.start("up") as ratchet:
        home.read_until(ratchet, "exit code 3")
        assert ratchet.wait(30) == 1


def test_a_killed_process_is_started_again(home: Home) -> None:
    home.write()
    with home.start("up") as ratchet:
        home.read_until(ratchet, "print(answer.model")
        before = json.loads((home.folder / "run" / "up.json").read_text())
        os.kill(int(next(iter(before))), signal.SIGKILL)
        home.read_until(ratchet, "gateway ended with exit code -9")

        def again() -> bool:
            now = json.loads((home.folder / "run" / "up.json").read_text())
            return len(now) == 2 and now != before

        until(again)
        ratchet.terminate()
        assert ratchet.wait(30) == 0


def test_a_process_that_keeps_failing_names_its_log(home: Home) -> None:
    # Never ready, so that the failures come during the start; five of them take 1 + 2 + 4 + 8 seconds.
    home.write(process("broken", "raise SystemExit('no such weights')"), prepare="")
    home.config.write_text(home.config.read_text().replace("{home}/ready", "{home}/never", 1))
    with home.start("up") as ratchet:
        seen = home.read_until(ratchet, "broken failed 5 times in a row")
        assert str(home.folder / "logs" / "broken.log") in seen
        assert "no such weights" in home.read_until(ratchet, "no such weights")
        assert ratchet.wait(30) == 1


def test_overrides_reach_the_processes(home: Home) -> None:
    home.write(process("echo", "import sys, time; print(sys.argv); sys.stdout.flush(); time.sleep(600)"))
    with home.start("up", "--set", "model.name=mine") as ratchet:
        assert "Models: mine" in home.read_until(ratchet, "print(answer.model")
        until(lambda: "'--set', 'model.name=mine'" in (home.folder / "logs" / "echo.log").read_text())
        ratchet.terminate()
        assert ratchet.wait(30) == 0
