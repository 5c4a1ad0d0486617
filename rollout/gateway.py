"""Where the deployment's gateway listens, and a client for it: the judge and the demo are API users."""

from __future__ import annotations

from typing import Any

import openai

from clients.client import AsyncRatchet
from rollout import config
from rollout.seed import KEY_FILE

REQUEST_TIMEOUT_S = 300.0
EVERYWHERE = ("", "0.0.0.0", "::")


def base_url(document: dict[str, Any]) -> str:
    """The API's base URL as ``[gateway]`` gives it; a gateway on every interface is asked on loopback."""
    table = document.get("gateway", {})
    host, port = table.get("host", "127.0.0.1"), table.get("port", 8000)
    return f"http://{'127.0.0.1' if host in EVERYWHERE else host}:{port}/v1"


def beside_api(client: openai.AsyncOpenAI, path: str) -> str:
    """URL of a route of the gateway that is not below ``/v1``."""
    return str(client.base_url).rstrip("/").removesuffix("/v1") + path


def client(document: dict[str, Any], *, retries: int) -> AsyncRatchet:
    """A client with the deployment's own key. Raises ConfigError when there is none yet."""
    path = config.home(document) / KEY_FILE
    try:
        key = path.read_text().strip()
    except FileNotFoundError:
        raise config.ConfigError(f"{path} is missing; run `python -m rollout seed` first") from None
    return AsyncRatchet(
        base_url=base_url(document), api_key=key, max_retries=retries, timeout=REQUEST_TIMEOUT_S
    )
