"""``python -m learner build | sft | run``: make the model, the warm start, and the learning loop.

Nothing heavy is imported before the command that needs it: a learner that waits holds no torch.
"""

from __future__ import annotations

import importlib
import sys

COMMANDS = {
    "build": "learner.build",
    "sft": "learner.sft",
    "run": "learner.switch",
}


def main(argv: list[str]) -> int:
    if not argv or argv[0] not in COMMANDS:
        print(
            f"usage: python -m learner {'|'.join(COMMANDS)} --config FILE [--set KEY=VALUE]", file=sys.stderr
        )
        return 2
    command: int = importlib.import_module(COMMANDS[argv[0]]).main(argv[1:])
    return command


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
