"""Our ways of quantizing while loading, as vLLM finds them: entry point ``vllm.general_plugins``.

vLLM calls `register` in each of its processes, whatever it is going to run. So registering only makes the
names known: kernels and layers' methods are imported when an engine was started with one of them as its
``--quantization``.
"""

from __future__ import annotations


def register() -> None:
    """Make them known to vLLM in this process; calling it again changes nothing."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

    from quant.cpu.config import CONFIGS

    for config in CONFIGS:
        if config.name not in QUANTIZATION_METHODS:
            register_quantization_config(config.name)(config)
