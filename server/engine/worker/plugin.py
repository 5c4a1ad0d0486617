"""What changes in every process of vLLM: entry point ``vllm.general_plugins``.

vLLM calls `register` in its API process, in the one that schedules and in each worker, whatever it is going
to run. What only a worker needs is in `extension`, which also refuses another vLLM than it was written for.
"""

from __future__ import annotations

from server.engine.worker import batch, waiting


def register() -> None:
    """Apply the changes in this process; calling it again changes nothing."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.platforms import current_platform
    from vllm.v1.core.sched.scheduler import Scheduler

    if Scheduler.schedule.__module__ != batch.__name__:
        Scheduler.schedule = batch.schedule(Scheduler.schedule)
    if current_platform.is_cpu() and SpinCondition.wait.__module__ != waiting.__name__:
        SpinCondition.wait = waiting.waiting(SpinCondition.wait)
