"""The routed experts of each token in an engine on a CPU: `enable_return_routed_experts`, which vLLM has for GPUs alone.

vLLM's scheduler and routers support the option everywhere, but its model runner for CPUs does not. Here the runner keeps a row at the
same index for every token in the KV cache: the rows of a shared prefix, and of a prompt that is computed in parts or again, are
found wherever keys and values are.
"""

from __future__ import annotations

from typing import Any

import numpy as np

RUNNER = "vllm.v1.worker.cpu_model_runner:CPUModelRunner"


class RoutedExperts:
    """The rows of one worker."""

    def __init__(self, runner: Any) -> None:
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
            RoutedExpertsCapturer,
            bind_routed_experts_capturer,
        )
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        config, cache = runner.vllm_config, runner.kv_cache_config
        self.step = RoutedExpertsCapturer(config.scheduler_config.max_num_batched_tokens, config)
        bind_routed_experts_capturer(runner.model, self.step)
        # Other kinds of attention free the blocks of earlier tokens.
        whole = [isinstance(group.kv_cache_spec, FullAttentionSpec) for group in cache.kv_cache_groups]
        if True not in whole:
            raise ValueError("the experts of a model are not returned if no layer attends to all tokens")
        group = whole.index(True)
        self.table = runner.input_batch.block_table[group]
        num_tokens = cache.num_blocks * cache.kv_cache_groups[group].kv_cache_spec.block_size
        self.rows = np.zeros((num_tokens, *self.step.shape_per_token), self.step.output_dtype_name)
        self.told: dict[str, int] = {}
        """By request, the number of tokens whose rows the scheduler has."""
        self.generation = 0

    def after(self, runner: Any, scheduled: Any) -> dict[str, Any]:
        """Store the rows of a forward pass; returns those new to the scheduler, of each request that samples a token after it."""
        from vllm.distributed.aux_output_connector.connector import AuxRequestOutput

        asked = scheduled.aux_output_connector_metadata
        if asked.generation != self.generation:
            self.generation = asked.generation
            self.told.clear()
        for request in asked.finished_requests:
            self.told.pop(request, None)
        batch, found = runner.input_batch, {}
        rows = self.step.snapshot_routing_data(scheduled.total_num_scheduled_tokens).numpy()
        first = 0
        for row, request in enumerate(batch.req_ids):
            start = int(batch.num_computed_tokens_cpu[row])
            end = start + scheduled.num_scheduled_tokens[request]
            self.rows[self._places(row, start, end)] = rows[first : first + end - start]
            first += end - start
            if end >= runner.requests[request].num_tokens:
                begin = max(self.told.get(request, 0), asked.requests[request])
                found[request] = AuxRequestOutput(begin, self.rows[self._places(row, begin, end)])
                self.told[request] = end
        assert first == len(rows), f"{first} tokens of requests in a step of {len(rows)}"
        return found

    def _places(self, row: int, start: int, end: int) -> np.ndarray:
        """Indices in the cache of tokens `start` to `end`, end excluded, of the request in this row of the batch."""
        positions = np.arange(start, end)
        size = self.table.block_size
        return self.table.block_table.np[row, positions // size].astype(np.int64) * size + positions % size


def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
    """The model runner's `execute_model`, which also stores the rows in its `RoutedExperts`."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    is_asked = scheduler_output.aux_output_connector_metadata is not None
    if is_asked and not hasattr(self, "routed_experts"):
        self.routed_experts = RoutedExperts(self)
    output = super(CPUModelRunner, self).execute_model(scheduler_output, *args, **kwargs)
    has_tokens = scheduler_output.total_num_scheduled_tokens > 0
    self.routes_of_step = self.routed_experts.after(self, scheduler_output) if is_asked and has_tokens else None
    return output


def sample_tokens(self: Any, grammar_output: Any) -> Any:
    """The model runner's `sample_tokens`, with the rows in its output."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    output = super(CPUModelRunner, self).sample_tokens(grammar_output)
    if self.routes_of_step is not None:
        getattr(output, "_model_runner_output", output).aux_output_connector_output = self.routes_of_step
    return output
