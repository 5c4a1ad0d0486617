"""Compiles the native kernel once a machine and finds it again.

The library lies in the user's cache under a name made from the source and the flags, so a changed source is
built anew and two versions do not meet. It is written under a temporary name and renamed: several engines
starting together build twice at worst and never load half a file. Nothing here depends on the CPU of the
building machine: the kernel chooses its instruction set when it runs.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SOURCE = Path(__file__).with_name("int8_gemm.cpp")
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-ffp-contract=off")
"""No contraction: results must be the same on every instruction set."""


class BuildError(Exception):
    """The kernel cannot be built; the message says what is missing or what the compiler answered."""


def cache_dir() -> Path:
    """Where built kernels lie: ``$XDG_CACHE_HOME`` or ``~/.cache``, in ``ratchet/kernels``."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "ratchet" / "kernels"


def library(folder: Path | None = None) -> Path:
    """Path of the built kernel, building it first when it is not there. Raises BuildError."""
    folder = cache_dir() if folder is None else folder
    digest = hashlib.sha256(SOURCE.read_bytes() + " ".join(FLAGS).encode()).hexdigest()[:16]
    target = folder / f"int8_gemm-{digest}.so"
    if not target.exists():
        _compile(target)
    return target


def _compile(target: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise BuildError("recipe cpu-int8 needs a C++ compiler: install g++ (or set CXX), or use float32")
    print(f"building the int8 kernel with {compiler} (once, a few seconds)", file=sys.stderr, flush=True)
    started = time.monotonic()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        command = [compiler, *FLAGS, "-o", str(made), str(SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BuildError(f"{' '.join(command)} failed:\n{done.stderr}")
        made.rename(target)
    print(f"built {target} in {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
