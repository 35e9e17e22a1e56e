"""Teachers: their engines' GPUs, and the time in which they read completions. Rows are assumed to be shared equally among them."""

from __future__ import annotations

from collections.abc import Sequence

from mgrpo.config.distillation import SELF
from mgrpo.config.schema import Config
from mgrpo.models.shape import ModelShape
from mgrpo.planner.hardware import Hardware
from mgrpo.planner.work import Workload, generation_flops


def num_teacher_workers(config: Config) -> int:
    """Workers of all teachers' engines that the run starts."""
    return config.distillation.num_engines * config.distillation.teacher_tensor_parallel_size


def num_teacher_gpus(config: Config, *, num_free: int) -> int:
    """GPUs of teachers' engines: one for each worker, or fewer where too few are free and several engines fit on one.

    Args:
        num_free: GPUs that neither learners nor the policy's engines take.
    """
    own, workers = config.distillation, num_teacher_workers(config)
    if not workers or config.engine.shares_gpus:
        return 0
    packed = workers if own.teacher_tensor_parallel_size > 1 else -(-workers // own.engines_per_gpu)
    return max(min(workers, num_free), packed)


def teaching_seconds(
    config: Config, shape: ModelShape, teachers: Sequence[ModelShape], work: Workload, hardware: Hardware, *, gpus: int
) -> float:
    """Seconds of one forward pass of the teachers over the batch; 0 without any, and for servers, whose GPUs are not the run's.

    Args:
        teachers: shapes of `Distillation.loaded_teachers`.
        gpus: of the learners, where these hold the teachers.
    """
    own = config.distillation
    if not own.distills or own.teacher_mode == "server":
        return 0.0
    loaded = iter(teachers)
    shapes = [shape if teacher.model == SELF else next(loaded) for teacher in own.teachers]
    each = [generation_flops(teacher, work) * (1 / len(shapes)) for teacher in shapes]
    if own.teacher_mode == "learner":
        return sum(hardware.compute_seconds(flops, gpus=gpus) for flops in each)
    workers = own.teacher_num_engines * own.teacher_tensor_parallel_size
    return max(hardware.compute_seconds(flops, gpus=workers) for flops in each)
