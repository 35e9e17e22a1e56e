"""What a teacher's engine needs in vLLM's workers, of which it becomes a base class (`worker_extension_cls`)."""

from __future__ import annotations

from typing import Any


class TeacherWorker:
    """A worker of a teacher's engine."""

    def divide_logits(self, temperature: float) -> None:
        """Divide all logits from here on, in float32: vLLM has a temperature for what it samples only, not for the prompt's tokens."""
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        def divide(module: Any, args: Any, logits: Any) -> Any:
            return None if logits is None else logits.float() / temperature

        worker: Any = self
        heads = [module for module in worker.get_model().modules() if isinstance(module, LogitsProcessor)]
        if not heads:
            raise RuntimeError("teacher_temperature: this model's logits are not those of vLLM's LogitsProcessor")
        for head in heads:
            head.register_forward_hook(divide)
