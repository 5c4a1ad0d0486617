"""``python -m server --config FILE`` serves; ``python -m server keys create ...`` makes an API key."""

import logging
import sys

import uvicorn

from rollout import config
from rollout.store import StoreError
from server import keys
from server.app import create_app
from server.gateway import build


def serve() -> None:
    args = config.arguments("Ratchet's gateway").parse_args()
    parts = build(config.read(args.config, args.overrides))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    uvicorn.run(
        create_app(parts),
        host=parts.config.host,
        port=parts.config.port,
        http="httptools",
        access_log=False,
        log_config=None,
        timeout_graceful_shutdown=10,
        timeout_keep_alive=parts.config.keep_alive_s,
    )


def main() -> None:
    try:
        keys.main(sys.argv[2:]) if sys.argv[1:2] == ["keys"] else serve()
    except (config.ConfigError, StoreError) as error:
        sys.exit(f"server: {error}")


if __name__ == "__main__":
    main()
