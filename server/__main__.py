"""``python -m server --config FILE`` serves; ``python -m server keys create ...`` makes an API key."""

import logging
import sys

from rollout import config
from rollout.store import StoreError
from server import keys, listen
from server.app import create_app
from server.gateway import build


def serve() -> None:
    args = config.arguments("Ratchet's gateway").parse_args()
    parts = build(config.read(args.config, args.overrides))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    listen.serve(create_app(parts), parts.config)


def main() -> None:
    try:
        keys.main(sys.argv[2:]) if sys.argv[1:2] == ["keys"] else serve()
    except (config.ConfigError, StoreError) as error:
        sys.exit(f"server: {error}")


if __name__ == "__main__":
    main()
