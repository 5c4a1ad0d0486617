"""Who may import whom, and that what must stay light does."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ["server", "rollout", "learner", "quant", "clients"]
HEAVY = ["torch", "vllm", "deepspeed", "transformers", "peft", "bitsandbytes"]


def run_python(code: str, *flags: str, cwd: Path = ROOT) -> str:
    finished = subprocess.run(
        [sys.executable, *flags, "-c", code],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


def test_import_contracts_hold() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert finished.returncode == 0, finished.stdout


@pytest.mark.parametrize(
    "module",
    [
        "server.app",
        "server.engine.supervisor",
        "rollout.judge",
        "rollout.demo",
        "clients.cli",
        "quant.recipes",
        "quant.acceptance",
    ],
)
def test_light_processes_import_nothing_heavy(module: str) -> None:
    """The learner too: one that waits for learning to be switched on holds no torch."""
    loaded = run_python(f"import {module}, sys; print(*({set(HEAVY)} & set(sys.modules)))")
    assert loaded == ""


def test_our_packages_are_the_ones_that_are_imported() -> None:
    """Outside this folder another distribution's top-level `server` would win over an editable install."""
    code = f"import importlib; print(*(importlib.import_module(name).__file__ for name in {PACKAGES}))"
    files = run_python(code, "-P", cwd=Path("/")).split()
    assert files == [str(ROOT / name / "__init__.py") for name in PACKAGES]


def test_of_quant_the_server_imports_only_the_recipes_and_their_acceptance() -> None:
    imported = set()
    for path in (ROOT / "server").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "quant":
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                imported |= {".".join(name.split(".")[:2]) for name in names}
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names if alias.name.split(".")[0] == "quant"}
    assert imported <= {"quant.recipes", "quant.acceptance"}


def test_main_modules_are_short() -> None:
    mains = [path for name in PACKAGES for path in (ROOT / name).rglob("__main__.py")]
    assert mains
    assert {str(path): n for path in mains if (n := len(path.read_text().splitlines())) > 40} == {}


def test_no_test_folder_shadows_a_package() -> None:
    """Without `__init__.py` at every level pytest would import tests/server as `server`."""
    folders = {path.parent for path in (ROOT / "tests").rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []
