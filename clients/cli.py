"""The `ratchet` command: start the stack, switch learning, look at what is served.

`up` and `demo` read the TOML and start processes; everything else is HTTP to a running gateway, found by
OPENAI_BASE_URL and OPENAI_API_KEY or else by the same TOML.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from openai import APIConnectionError, APIError
from rich.console import Console
from rich.table import Table

from clients import deployment as deployments
from clients import up
from clients.client import Ratchet
from clients.deployment import Deployment, DeploymentError

LOCAL = Path("deploy/local.toml")
DEMO = Path("deploy/demo.toml")


def main(argv: list[str] | None = None) -> int:
    args, rest = parser().parse_known_args(argv)
    if rest and args.command != "demo":
        parser().error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        deployment = deployments.load(args.config, args.overrides)
        if args.command in ("up", "demo"):
            return _start(deployment, args.command, rest)
        return COMMANDS[args.command](_client(deployment), args)
    except DeploymentError as error:
        print(f"ratchet: {error}", file=sys.stderr)
        return 2
    except APIConnectionError as error:
        print(
            f"ratchet: no gateway answers at {error.request.url.host}:{error.request.url.port}",
            file=sys.stderr,
        )
        return 1
    except APIError as error:
        print(f"ratchet: {error.message}", file=sys.stderr)
        return 1


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="ratchet", description="A server whose model keeps learning.")
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, config: Path = LOCAL) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text)
        added.add_argument("--config", type=Path, default=config, help="the deployment's TOML (%(default)s)")
        added.add_argument(
            "--set",
            action="append",
            default=[],
            dest="overrides",
            metavar="KEY=VALUE",
            help="override one key",
        )
        return added

    command("up", "start everything the TOML names and watch it")
    command("demo", "start everything, drive traffic, learn from it, show what came of it", DEMO)
    learn = command("learn", "switch continuous learning, or ask about it")
    learn.add_argument("action", choices=["on", "off", "status"])
    command("status", "what is served now")
    command("policies", "every policy and what became of it")
    restart = command("restart", "start one engine anew once its requests are answered")
    restart.add_argument("replica", help="as `ratchet status` names it: fast-0")
    restart.add_argument("--force", action="store_true", help="also when its tier has no other in rotation")
    return root


def _start(deployment: Deployment, command: str, rest: list[str]) -> int:
    return up.demo(deployment, rest) if command == "demo" else up.up(deployment)


def _client(deployment: Deployment) -> Ratchet:
    key = os.environ.get("OPENAI_API_KEY")
    if key is None:
        try:
            key = deployment.key_file.read_text().strip()
        except FileNotFoundError:
            raise DeploymentError(
                f"no API key: set OPENAI_API_KEY, or run `ratchet up`, which makes {deployment.key_file}"
            ) from None
    return Ratchet(
        base_url=os.environ.get("OPENAI_BASE_URL", deployment.base_url), api_key=key, max_retries=0
    )


def _learn(client: Ratchet, args: argparse.Namespace) -> int:
    learning = client.rl.learning
    state = learning.retrieve() if args.action == "status" else learning.set(args.action == "on")
    console = Console(highlight=False)
    console.print(f"learning is {'on' if state.enabled else 'off'}")
    for name, value in (state.status or {}).items():
        console.print(f"  {name}: {value}")
    return 0


def _status(client: Ratchet, args: argparse.Namespace) -> int:
    serving = client.rl.tiers.retrieve()
    table = Table("tier", "replica", "ready", "policies it holds", "in flight")
    ready = True
    for tier, replicas in serving.tiers.items():
        ready = ready and any(replica.ready for replica in replicas)
        for replica in replicas:
            state = "yes" if replica.ready else f"no: {replica.why_not}"
            in_flight = str(sum(replica.in_flight.values()))
            table.add_row(tier, replica.id, state, ", ".join(replica.verified), in_flight)
    console = Console(highlight=False)
    console.print(table)
    console.print(f"serving {serving.promoted}; before it {serving.previous or 'none'}")
    console.print(f"learning is {'on' if client.rl.learning.retrieve().enabled else 'off'}")
    return 0 if ready else 1


def _policies(client: Ratchet, args: argparse.Namespace) -> int:
    table = Table("policy", "state", "parent", "reason")
    for policy in client.rl.policies.list():
        table.add_row(policy.id, policy.state, policy.manifest.get("parent") or "-", policy.reason or "")
    Console(highlight=False).print(table)
    return 0


def _restart(client: Ratchet, args: argparse.Namespace) -> int:
    client.rl.tiers.restart(args.replica, force=args.force)
    Console(highlight=False).print(f"{args.replica} starts anew; `ratchet status` shows when it serves again")
    return 0


COMMANDS: dict[str, Callable[[Ratchet, argparse.Namespace], int]] = {
    "learn": _learn,
    "status": _status,
    "policies": _policies,
    "restart": _restart,
}


if __name__ == "__main__":
    sys.exit(main())
