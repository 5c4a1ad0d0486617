"""Scaled positions: what becomes of a model's configuration, and which models and lengths are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollout import positions
from rollout.config import ConfigError, ModelConfig, RopeConfig

PLAIN = {
    "max_position_embeddings": 2048,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def model(folder: Path, method: Any = None, factor: float = 2.0, **config: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(PLAIN | config))
    return ModelConfig(path=str(folder), rope=RopeConfig(method=method, factor=factor) if method else None)


def test_without_it_a_model_stays_as_it_is(tmp_path: Path) -> None:
    assert positions.overrides(model(tmp_path)) == {}


def test_yarn_names_the_trained_length(tmp_path: Path) -> None:
    assert positions.overrides(model(tmp_path, "yarn", 1.5)) == {
        "max_position_embeddings": 3072,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 1.5,
            "original_max_position_embeddings": 2048,
            "rope_theta": 10000.0,
        },
    }


@pytest.mark.parametrize("factor", [2.0, 4.0])
def test_ntk_puts_the_slowest_pair_at_the_longest_position_where_it_was_in_training(
    tmp_path: Path, factor: float
) -> None:
    scaled = positions.overrides(model(tmp_path, "ntk", factor))
    assert scaled["max_position_embeddings"] == 2048 * factor
    theta, size = scaled["rope_parameters"]["rope_theta"], 64
    slowest = -(size - 2) / size
    assert 2048 * factor * theta**slowest == pytest.approx(2048 * 10000.0**slowest)


def test_the_older_way_of_writing_a_configuration_is_understood(tmp_path: Path) -> None:
    older = model(tmp_path, "yarn", rope_parameters=None, rope_theta=500.0)
    assert positions.overrides(older)["rope_parameters"]["rope_theta"] == 500.0


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}},
            r"scales its positions already \(llama3\)",
        ),
        ({"rope_parameters": None}, "no single rotary embedding"),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_theta": 1.0},
                    "sliding_attention": {"rope_theta": 2.0},
                }
            },
            "no single rotary embedding",
        ),
    ],
)
def test_what_cannot_be_scaled_is_refused(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        positions.overrides(model(tmp_path, "yarn", **config))


def test_a_model_that_is_no_folder_cannot_be_scaled_and_is_not_measured() -> None:
    rope = RopeConfig(method="ntk", factor=2.0)
    with pytest.raises(ConfigError, match="name the model's folder"):
        positions.overrides(ModelConfig(path="some/model", rope=rope))
    positions.check_length(ModelConfig(path="some/model"), 10**6)


def test_more_positions_than_there_are_is_refused_in_words(tmp_path: Path) -> None:
    positions.check_length(model(tmp_path), 2048)
    with pytest.raises(
        ConfigError, match=r"2049 is more than the 2048 positions of .*; lower it, or scale them"
    ):
        positions.check_length(model(tmp_path), 2049)
    positions.check_length(model(tmp_path, "ntk"), 4096)
    with pytest.raises(ConfigError, match="4097 is more than the 4096 positions"):
        positions.check_length(model(tmp_path, "ntk"), 4097)
