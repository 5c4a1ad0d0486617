"""Reading a deployment's TOML for `ratchet`."""

from __future__ import annotations

from pathlib import Path

import pytest

from clients.deployment import DeploymentError, load


def write(folder: Path, text: str) -> Path:
    config = folder / "d.toml"
    config.write_text(text)
    return config


def test_placeholders_and_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RATCHET_HOME", raising=False)
    config = write(
        tmp_path, f"[home]\npath = '{tmp_path}/h'\n[up]\nprepare = [['x', '{{config}}', '{{home}}/a']]"
    )
    deployment = load(config, ["gateway.port=9001", "gateway.host=::1", "tiers.fast.recipe=float32"])
    assert deployment.port == 9001
    assert deployment.host == "::1"
    assert deployment.model_names == ["ratchet-fast"]
    expected = ["x", str(config), f"{tmp_path}/h/a"]
    assert deployment.prepare[0][:3] == expected
    assert deployment.prepare[0][3:5] == ["--set", "gateway.port=9001"]


def test_home_comes_from_the_environment_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_HOME", str(tmp_path / "elsewhere"))
    assert load(write(tmp_path, ""), []).home == tmp_path / "elsewhere"


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("[up]\nproces = []", [], "no key 'proces'"),
        ("[[up.process]]\nname = 'a'", [], "takes name, argv"),
        ("[", [], "d.toml"),
        ("", ["nothing"], "expected KEY=VALUE"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, overrides: list[str], message: str) -> None:
    with pytest.raises(DeploymentError, match=message):
        load(write(tmp_path, text), overrides)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DeploymentError, match="no such file"):
        load(tmp_path / "none.toml", [])
