"""The README's Python runs as it stands, block after block, against a real gateway on real engines."""

from __future__ import annotations

import pytest

from tests.contracts.test_readme import BLOCKS
from tests.server.gateways import Deployment

pytestmark = pytest.mark.engine


def test_the_readmes_python_runs(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", f"{deployment.url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", deployment.key)
    namespace: dict[str, object] = {}
    for language, code in BLOCKS:
        if language == "python":
            exec(compile(code, "README.md", "exec"), namespace)
    promoted = deployment.state()["promoted"]
    assert f"ratchet@{promoted}" in capsys.readouterr().out
