def register() -> None:
    """Filled in by the engine work."""
