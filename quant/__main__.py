"""``python -m quant build-kernel``: compile the int8 kernel now instead of at an engine's first start."""

from __future__ import annotations

import argparse
import sys

from quant.cpu import build


def main() -> int:
    parser = argparse.ArgumentParser(description="Tools of the quantized tiers.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "build-kernel", help="compile the CPU kernel of recipe cpu-int8 into the user's cache"
    )
    parser.parse_args()
    try:
        print(build.library())
    except build.BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
