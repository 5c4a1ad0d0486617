"""Identity of the base weights: the same for the same weights, whoever wrote them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollout import artifacts
from tests.rollout.test_artifacts import safetensors, zeros


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"hidden_size": 8, "transformers_version": "5.0"}))
    (folder / "model.safetensors").write_bytes(safetensors({"w": zeros(2, 3)}))
    return folder


def test_a_base_is_its_config_and_weights(model: Path) -> None:
    first = artifacts.base_id(model)
    (model / "tokenizer.json").write_text("{}")
    (model / "config.json").write_text(json.dumps({"transformers_version": "6.0", "hidden_size": 8}))
    assert artifacts.base_id(model) == first
    (model / "config.json").write_text(json.dumps({"hidden_size": 9}))
    assert artifacts.base_id(model) != first
    (model / "config.json").write_text(json.dumps({"hidden_size": 8}))
    assert artifacts.base_id(model) == first
    (model / "model.safetensors").write_bytes(safetensors({"w": zeros(2, 4)}))
    assert artifacts.base_id(model) != first


def test_a_torn_sidecar_is_computed_anew(model: Path) -> None:
    first = artifacts.base_id(model)
    sidecar = model / artifacts.BASE_SIDECAR
    whole = sidecar.read_text()
    sidecar.write_text(whole[:20])
    assert artifacts.base_id(model) == first
    assert sidecar.read_text() == whole


def test_a_folder_without_weights_is_no_base(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="safetensors"):
        artifacts.base_id(tmp_path)
