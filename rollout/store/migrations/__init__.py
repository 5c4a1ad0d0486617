"""Schema versions, run by `Store.migrate` with alembic; no command line of alembic, no ini file."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection

FOLDER = Path(__file__).parent


def upgrade(connection: Connection, revision: str = "head") -> None:
    """Run what is missing, in the transaction of `connection`: a schema changes wholly or not at all."""
    config = Config()
    config.set_main_option("script_location", str(FOLDER).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, revision)
