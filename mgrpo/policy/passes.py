"""Megatron's pipeline schedule over micro-batches: forward passes alone, or with the backward passes of a loss.

Every rank must call with equally many micro-batches. Results are those of the last pipeline stage; other stages get none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config
from torch.autograd.profiler import record_function

from mgrpo.parallel import pipeline
from mgrpo.policy.microbatch import Microbatch, MicrobatchLoss, Reported
from mgrpo.policy.routing import RoutingReplay


@record_function("mgrpo: score")
def forward(
    chunks: Sequence[torch.nn.Module],
    microbatches: Sequence[Microbatch],
    *,
    routing: RoutingReplay,
    replays: bool = False,
) -> list[torch.Tensor]:
    """The model's output for each micro-batch; with `replays` under the experts that engines chose."""

    def use(microbatch: Microbatch, output: torch.Tensor, non_loss_data: bool = True) -> torch.Tensor:
        return output

    return _run(chunks, microbatches, use, routing=routing, replays=replays, forward_only=True)


@record_function("mgrpo: forward and backward")
def forward_backward(
    chunks: Sequence[torch.nn.Module],
    microbatches: Sequence[Microbatch],
    loss: MicrobatchLoss[Reported],
    *,
    routing: RoutingReplay,
) -> list[Reported]:
    """Add up the gradients of all micro-batches; return the report of `loss` for each."""

    def use(microbatch: Microbatch, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Reported]:
        candidates = (output[2:].t(),) if len(output) > 2 else ()
        value, reported = loss(output[0], output[1], microbatch, *candidates)
        # Megatron needs a count of tokens to divide by. Nothing divides by it: the loss has its global denominator.
        return value, torch.zeros((), dtype=torch.int, device=value.device), reported

    return _run(chunks, microbatches, use, routing=routing, replays=True, forward_only=False)


def _run(
    chunks: Sequence[torch.nn.Module],
    microbatches: Sequence[Microbatch],
    use: Callable[..., Any],
    *,
    routing: RoutingReplay,
    replays: bool,
    forward_only: bool,
) -> list[Any]:
    chunk_index = {id(chunk): index for index, chunk in enumerate(chunks)}

    def forward_step(batches: Iterator[Microbatch], chunk: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
        microbatch, index = next(batches), chunk_index[id(chunk)]
        choices = microbatch.routing.get(index) if replays else None
        if choices is None and replays and microbatch.routes is not None:
            choices = routing.of(index, microbatch.routes)
        routing.replay(index, choices, is_training=not forward_only)
        output = chunk(
            microbatch.tokens,
            microbatch.positions,
            documents=microbatch.documents,
            response=microbatch.response,
        )
        if routing.is_recording:
            microbatch.routing[index] = routing.recorded(index)
        return output, partial(use, microbatch)

    # The chunks of a stage are called in turn, each with the same micro-batches.
    iterators = [iter(microbatches) for _ in chunks]
    is_interleaved = len(chunks) > 1
    config = get_model_config(chunks[0])
    results = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if is_interleaved else iterators[0],
        model=list(chunks) if is_interleaved else chunks[0],
        num_microbatches=len(microbatches),
        seq_length=1,  # not read: packs differ in length
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
        **pipeline.communication(config, [_hidden_shape(batch, config) for batch in microbatches], len(chunks)),
    )
    routing.choose_freely()
    return results


def _hidden_shape(microbatch: Microbatch, config: TransformerConfig) -> pipeline.Shape:
    """Shape of the hidden states that this rank sends to the next stage."""
    num_tokens = microbatch.tokens.shape[1]
    if config.sequence_parallel:
        num_tokens //= config.tensor_model_parallel_size
    return num_tokens, 1, config.hidden_size
