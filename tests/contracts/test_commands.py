"""The command line people type is frozen: a change here is a change of the interface."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from clients.cli import parser

COMMANDS = {
    "up": ["--config", "--set"],
    "demo": ["--config", "--set"],
    "learn": ["--config", "--set", "action"],
    "status": ["--config", "--set"],
    "policies": ["--config", "--set"],
    "restart": ["--config", "--force", "--set", "replica"],
}


def test_commands_of_ratchet() -> None:
    choices = next(a for a in parser()._actions if isinstance(a, argparse._SubParsersAction)).choices
    found = {
        name: sorted((a.option_strings or [a.dest])[-1] for a in sub._actions if a.dest != "help")
        for name, sub in choices.items()
    }
    assert found == COMMANDS


def test_only_the_demonstration_has_a_deployment_of_its_own() -> None:
    needs = {"learn": ["status"], "restart": ["fast-0"]}
    commands = [[name, *needs.get(name, [])] for name in COMMANDS]
    defaults = {argv[0]: parser().parse_args(argv).config.name for argv in commands}
    assert defaults.pop("demo") == "demo.toml"
    assert set(defaults.values()) == {"local.toml"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["server"],
        ["server.engine"],
        ["rollout", "migrate"],
        ["rollout", "seed"],
        ["rollout", "judge"],
        ["rollout", "demo"],
        ["learner", "build"],
        ["learner", "sft"],
        ["learner", "run"],
    ],
    ids=" ".join,
)
def test_every_process_takes_config_and_set(arguments: list[str]) -> None:
    command = [sys.executable, "-m", *arguments, "--help"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert "--config" in finished.stdout
    assert "--set" in finished.stdout
