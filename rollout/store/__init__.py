"""The durable rows of every process: `Store` opens them, one module per kind of row reads and writes them."""

from rollout.store.database import Store, StoreError

__all__ = ["Store", "StoreError"]
