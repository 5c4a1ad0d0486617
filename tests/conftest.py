"""Fixtures of all tests, by the file that owns them."""

pytest_plugins = ["tests.fixtures.models", "tests.fixtures.engines", "tests.fixtures.databases"]
