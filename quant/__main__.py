"""``python -m quant``: ``accept`` tests a tier's recipe, ``build-kernel`` compiles the CPU kernel now."""

from __future__ import annotations

import argparse
import sys

from quant import accept
from quant.cpu import build
from quant.serving import EngineFailed
from rollout.config import ConfigError, arguments


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="python -m quant", description="Tools of the quantized tiers.")
    commands = root.add_subparsers(dest="command", required=True)
    commands.add_parser("build-kernel", help="compile the kernel of the CPU recipes into the user's cache")
    base = arguments("", add_help=False)
    accept.add_arguments(
        commands.add_parser("accept", parents=[base], help="test a tier's recipe against full precision")
    )
    return root


def main() -> int:
    args = parser().parse_args()
    try:
        if args.command == "accept":
            return accept.main(args)
        print(build.library())
    except (build.BuildError, ConfigError, EngineFailed) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
