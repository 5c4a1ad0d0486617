"""``python -m server keys create``: makes an API key and prints its secret, once. Only the hash is stored."""

from __future__ import annotations

import sys
import time
import uuid

from rollout import config
from rollout.records import ApiKey, Scope
from rollout.store import Store, projects
from server.auth import new_secret


def main(arguments: list[str]) -> None:
    parser = config.arguments("make an API key")
    parser.prog = "python -m server keys"
    parser.add_argument("action", choices=["create"])
    parser.add_argument("--project", default="default", help="whose key it is")
    parser.add_argument(
        "--scopes", nargs="+", choices=[scope.value for scope in Scope], default=[Scope.INFERENCE.value]
    )
    args = parser.parse_args(arguments)
    document = config.read(args.config, args.overrides)
    store = Store.open(config.section(document, "store", config.StoreConfig).url)
    try:
        print(create(store, args.project, [Scope(scope) for scope in args.scopes]))
    finally:
        store.close()


def create(store: Store, project: str, scopes: list[Scope]) -> str:
    """The secret of a new key of `project`. Exits when there is no such project."""
    secret = new_secret()
    key = ApiKey(id=f"key-{uuid.uuid4().hex[:12]}", project_id=project, scopes=scopes, created_at=time.time())
    with store.write() as tx:
        if projects.get_project(tx, project) is None:
            sys.exit(
                f"no project '{project}'; there are: {', '.join(p.id for p in projects.list_projects(tx))}"
            )
        projects.create_key(tx, key, projects.hash_secret(secret))
    return secret
