"""The contract between recipes and what starts engines."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError

import pytest

from quant.recipes import RECIPES


def test_every_recipe_is_known_by_its_own_name_and_states_what_it_is() -> None:
    assert {"float32", "bfloat16", "cpu-int8", "gpu-fp8", "gpu-fp8-tensor", "bnb-nf4", "bnb-int8"} <= set(
        RECIPES
    )
    for name, recipe in RECIPES.items():
        assert recipe.name == name
        assert recipe.device in ("cpu", "gpu", "any")
        assert recipe.description


def test_nothing_that_needs_a_gpu_claims_to_be_measured() -> None:
    assert not [recipe.name for recipe in RECIPES.values() if recipe.measured and recipe.device == "gpu"]


def test_a_recipe_cannot_be_changed_by_who_reads_it() -> None:
    recipe = RECIPES["float32"]
    with pytest.raises(FrozenInstanceError):
        recipe.name = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        recipe.env["A"] = "b"  # type: ignore[index]


def test_recipes_load_neither_torch_nor_vllm() -> None:
    check = "import sys, quant.recipes; sys.exit(bool({'torch', 'vllm'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.device != "gpu"])
def test_vllm_knows_the_arguments_of_recipes_that_run_here(name: str) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from quant.cpu.plugin import register

    register()
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parsed = parser.parse_args(["--model", "anything", *RECIPES[name].args_on("cpu")])
    assert parsed.quantization in (None, "cpu_int8", "cpu_bnb_nf4", "cpu_bnb_int8")
