"""``python -m rollout migrate|seed|judge|demo --config FILE``."""

import argparse
import importlib
import sys

from rollout import config
from rollout.store import Store, StoreError

COMMANDS = {
    "seed": ("rollout.seed", "make the project, the key and the first policies"),
    "judge": ("rollout.judge", "verify, evaluate, and gate candidates"),
    "demo": ("rollout.demo", "drive traffic through a running stack and show that it learns"),
}


def migrate(args: argparse.Namespace) -> None:
    document = config.read(args.config, args.overrides)
    config.home(document).mkdir(parents=True, exist_ok=True)
    store = Store.open(config.section(document, "store", config.StoreConfig).url)
    store.migrate()
    store.close()


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in ("migrate", *COMMANDS):
        sys.exit("usage: python -m rollout migrate|seed|judge|demo [--config FILE] [--set KEY=VALUE]")
    command = sys.argv.pop(1)
    try:
        if command == "migrate":
            migrate(config.arguments("bring the store's schema up to date").parse_args())
        else:
            module, description = COMMANDS[command]
            importlib.import_module(module).main(config.arguments(description).parse_args())
    except (config.ConfigError, StoreError) as error:
        sys.exit(f"rollout {command}: {error}")


if __name__ == "__main__":
    main()
