"""What the README says can be checked, is."""

from __future__ import annotations

import re
import shlex
import textwrap
from typing import cast

import pytest
from fastapi.routing import APIRoute
from starlette.routing import Route

import quant.__main__
from clients.cli import parser
from server.app import create_app
from server.gateway import Gateway
from tests.contracts import tree

TEXT = tree.README.read_text()
BLOCKS = re.findall(r"```(python|bash)\n(.*?)```", TEXT, re.DOTALL)


def test_the_tree_names_every_file() -> None:
    _, _, rest = TEXT.partition(tree.BEGIN)
    shown, _, _ = rest.partition(tree.END)
    assert shown == tree.tree(), "run python -m tests.contracts.tree"


def test_every_file_says_what_it_is_for() -> None:
    silent = [line for line in tree.tree().splitlines() if line.endswith((".py", ".sh", ".toml"))]
    assert silent == []


@pytest.mark.parametrize("code", [code for language, code in BLOCKS if language == "python"])
def test_python_blocks_compile(code: str) -> None:
    compile(textwrap.dedent(code), "README.md", "exec")


def test_commands_exist() -> None:
    lines = [line for language, code in BLOCKS if language == "bash" for line in code.splitlines()]
    assert len(lines) > 5
    for command in map(shlex.split, lines):
        if command[0] == "bash":
            assert (tree.ROOT / command[1]).exists()
        elif command[:3] == [".venv/bin/python", "-m", "quant"]:
            quant.__main__.parser().parse_args(command[3:])
        else:
            assert command[0] == ".venv/bin/ratchet"
            parser().parse_args(command[1:])


def test_paths_exist() -> None:
    named = set(re.findall(r"`([a-z][\w/.-]*\.(?:py|toml|sh|txt)|[a-z]+(?:/[a-z_]+)*/)`", TEXT))
    missing = [name for name in named if not list(tree.ROOT.rglob(name.rstrip("/")))]
    assert missing == []


def test_the_documented_routes_are_the_routes() -> None:
    documented = set(re.findall(r"^\| `(GET|POST) ([^`]+)`", TEXT, re.MULTILINE))
    # Routes do not touch the gateway until a request or the start-up does.
    app = create_app(cast(Gateway, None))
    served = {
        (method, re.sub(r":path}", "}", route.path))
        for route in app.routes
        if isinstance(route, APIRoute | Route)
        for method in route.methods or ()
        if method != "HEAD"
    }
    assert documented == served
