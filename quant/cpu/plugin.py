"""The quantization method `cpu_int8`, as vLLM finds it: entry point ``vllm.general_plugins``.

vLLM calls `register` in each of its processes, whatever it is going to run. So registering only makes the
name known: the kernel and the layers' methods are imported when an engine was started with
``--quantization cpu_int8``.
"""

from __future__ import annotations

NAME = "cpu_int8"


def register() -> None:
    """Make `cpu_int8` known to vLLM in this process; calling it again changes nothing."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

    from quant.cpu.config import CpuInt8Config

    if NAME not in QUANTIZATION_METHODS:
        register_quantization_config(NAME)(CpuInt8Config)
