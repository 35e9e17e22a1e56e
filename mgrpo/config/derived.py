"""Values that follow from the settings: the folder of training states, the layout of the ranks, and, once the prompts are counted, steps.

The length of a run, and what is due after a pass over the data or a share of the run, are known when the data have been read.
"""

from __future__ import annotations

import os
from dataclasses import replace
from fractions import Fraction
from math import ceil

from mgrpo.config.checkpoint import MANY_GPUS, SAVE_COST_S, best_interval_s, mtbf_s
from mgrpo.config.fields import build, flat, shown
from mgrpo.config.rollout import MOST_KEPT, MOST_MASKED
from mgrpo.config.schema import Config, Engine
from mgrpo.layout import InferLayout, Layout
from mgrpo.models.cuts import num_experts, size_of
from mgrpo.models.hf_config import HfConfig, read_hf_config

COUNTED = ("total_episodes", "save_freq", "local_eval_every", "max_prompt_token_length", "pack_length")
"""Settings that may follow from the number of training prompts and their lengths, all of them whole numbers."""


def state_root(config: Config) -> str:
    """Folder or URL of the run's training states."""
    own = config.checkpoint
    default = os.path.join(config.experiment.output_dir, "checkpoints")
    return own.checkpoint_state_dir or default


def most_tokens(config: Config, folder: str) -> int:
    """Tokens of the longest sequence that the teacher in this folder is asked about."""
    positions = size_of(read_hf_config(folder), "max_position_embeddings")
    return min(config.max_taught_length, positions or config.max_taught_length)


def reads_text(config: Config) -> bool:
    """True if the policy's engines need a tokenizer."""
    rollout = config.rollout
    return bool(rollout.stop_strings or config.agent.agent) or rollout.vllm_guided_decoding_regex is not None


def num_exports(config: Config) -> int:
    """Exports of the whole run; none of them is deleted."""
    own = config.checkpoint
    between = (config.num_training_steps - 1) // own.save_freq if own.save_freq > 0 else 0
    return between + own.save_final


def num_states(config: Config) -> int:
    """Training states on disk at most: the oldest goes when the newest is complete."""
    own = config.checkpoint
    if not own.saves_states:
        return 0
    states = config.num_training_steps // (1 if own.save_every_minutes else own.checkpoint_state_freq)
    return min(states, own.keep_last_n_checkpoints + 1) if own.keep_last_n_checkpoints > 0 else states


def with_saves(config: Config, num_gpus: int) -> Config:
    """`config` with states that are saved by time, where nobody has said whether they are and the run has many GPUs."""
    checkpoint, own = config.checkpoint, config.provenance
    is_open = checkpoint.save_every_minutes is None and not _is_given(config, "checkpoint_state_freq")
    if (
        not is_open
        or num_gpus < MANY_GPUS
        or config.parallel.use_precision_aware_optimizer
        or config.parallel.optimizer_cpu_offload
    ):
        return config
    minutes = max(round(best_interval_s(SAVE_COST_S, mtbf_s(num_gpus)) / 60), 1)
    note = (
        f"save_every_minutes is {minutes}: one of {num_gpus} GPUs fails every {mtbf_s(num_gpus) / 3600:.0f} hours; "
        "save_every_minutes=0 saves no states"
    )
    provenance = replace(own, notes=(*own.notes, note), sources={**own.sources, "save_every_minutes": "derived"})
    return build(flat(config) | {"save_every_minutes": float(minutes)}, provenance)


def seconds_between_saves(config: Config, step_s: float, num_gpus: int) -> float:
    """Seconds between training states in a run whose steps take `step_s`, which end with them; 0: none are saved."""
    own = with_saves(config, num_gpus).checkpoint
    by_time = step_s * ceil(60 * own.save_every_minutes / step_s) if own.save_every_minutes else 0
    by_steps = step_s * own.checkpoint_state_freq if own.checkpoint_state_freq > 0 else 0
    return min(filter(None, (by_time, by_steps)), default=0)


def num_gpus_of(config: Config, learners: int) -> int:
    """GPUs of the whole run: those of `learners` ranks and of its engines."""
    serving = infer_layout_of(config.engine)
    return learners + (serving.engines * serving.workers if config.engine.vllm_mode == "ray" else 0)


def layout_of(config: Config, world_size: int) -> Layout:
    """The training layout that the parallel section asks of `world_size` learner ranks."""
    parallel = config.parallel
    sequence_parallel = parallel.sequence_parallel
    return Layout(
        world_size=world_size,
        tensor=parallel.tensor_model_parallel_size,
        pipeline=parallel.pipeline_model_parallel_size,
        context=parallel.context_parallel_size,
        expert=parallel.expert_model_parallel_size,
        virtual_pipeline=parallel.virtual_pipeline_model_parallel_size,
        first_stage_layers=parallel.num_layers_in_first_pipeline_stage,
        last_stage_layers=parallel.num_layers_in_last_pipeline_stage,
        sequence_parallel=parallel.tensor_model_parallel_size > 1 if sequence_parallel == "auto" else sequence_parallel,
        zero_stage=parallel.zero_stage,
        shard_size=parallel.fsdp_shard_degree,
        tokens_multiple_of=parallel.tokens_multiple_of,
    )


def infer_layout_of(engine: Engine) -> InferLayout:
    """The inference layout that the engine section asks for."""
    return InferLayout(
        engines=engine.vllm_num_engines,
        tensor=engine.vllm_tensor_parallel_size,
        data=engine.vllm_data_parallel_size,
        expert_parallel=engine.vllm_enable_expert_parallel,
    )


def widest_cut(config: Config, vocab: int | None) -> Config:
    """`config` for engines on GPUs: cuts that nobody has bounded by top_k are bounded by the most that such an engine says of what
    it samples from."""
    rollout, own = config.rollout, config.provenance
    given = [
        text
        for text, is_on in (
            (f"top_p={shown(rollout.top_p)}", rollout.top_p < 1),
            (f"min_p={shown(rollout.min_p)}", rollout.min_p > 0),
            ("vllm_guided_decoding_regex", rollout.vllm_guided_decoding_regex is not None),
        )
        if is_on
    ]
    if not given or _is_given(config, "top_k") or config.engine.vllm_mode == "server":
        return config
    # An engine that returns masks refuses greedy sampling.
    most = min(MOST_KEPT if rollout.eval_temperature == 0 else MOST_MASKED, vocab or MOST_MASKED)
    note = (
        f"top_k is {most}, the most that an engine on a GPU says of what it samples from: with {' and '.join(given)} the trainer "
        "computes with the tokens that were left"
    )
    notes = (*(note for note in own.notes if not note.startswith("top_k is ")), note)
    return build(flat(config) | {"top_k": most}, replace(own, notes=notes, sources={**own.sources, "top_k": "derived"}))


def with_routing(config: Config, hf_config: HfConfig | None, *, on_gpu: bool) -> Config:
    """`config` with what routing_replay=auto means: the engines' experts for a mixture, if they say what they chose."""
    own = config.provenance
    if config.parallel.routing_replay != "auto" or not num_experts(hf_config):
        return config
    missing = untold_routes(config, on_gpu=on_gpu)
    mode = "none" if missing else "rollout"
    said = f": {missing}" if missing else ", the experts that engines choose are also those that are trained"
    values, notes = flat(config) | {"routing_replay": mode}, (*own.notes, f"routing_replay is {mode}{said}")
    return build(values, replace(own, notes=notes, sources={**own.sources, "routing_replay": "derived"}))


def untold_routes(config: Config, *, on_gpu: bool) -> str:
    """Why engines do not say which experts they chose; "" if they do."""
    settings = config.engine
    if settings.vllm_mode == "server" and config.parallel.routing_replay == "auto":
        return "vLLM servers say what they chose if they were started for it; see docs/servers.md"
    if settings.vllm_speculative_method != "none" and config.parallel.routing_replay == "auto":
        return "engines that draft say what they chose for tokens that they sample one by one"
    if on_gpu and settings.vllm_mode != "server" and not settings.vllm_enable_prefix_caching:
        return "on GPUs vLLM says what it chose with vllm_enable_prefix_caching=true alone"
    if on_gpu and os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0":
        return "VLLM_USE_V2_MODEL_RUNNER=0 chooses the model runner of vLLM that does not say what it chose; unset it"
    return ""


def routing_problems(config: Config, hf_config: HfConfig | None, *, on_gpu: bool) -> list[str]:
    """A sentence if the experts of engines are to be replayed that do not say them."""
    missing = untold_routes(config, on_gpu=on_gpu)
    if config.parallel.routing_replay != "rollout" or not num_experts(hf_config) or not missing:
        return []
    return [f"routing_replay=rollout needs the engines' choices of experts, but {missing}; or use learner or none"]


def bounded(config: Config, positions: int | None) -> Config:
    """`config` with prompts as long as the model's positions allow, where nobody has limited them; the data are read with these."""
    own, rollout = config.provenance, config.rollout
    if own.has_prompt_limit or not positions:
        return config
    room = positions - max(rollout.response_length, rollout.eval_response_length or 0)
    if _is_given(config, "pack_length"):
        room = min(room, config.parallel.pack_length - rollout.response_length)
    return _with_prompts_up_to(room, config) if room > 0 else config


def fitted(config: Config, longest: int) -> Config:
    """A `bounded` config with no more room than the data's longest prompt and the preset's length ask for.

    Args:
        longest: tokens of the longest prompt, before any was left out.
    """
    own, limit = config.provenance, config.data.max_prompt_token_length
    if own.has_prompt_limit:
        return config
    tokens = min(limit, max(longest, int(str(own.defaults["max_prompt_token_length"]))))
    found = _with_prompts_up_to(tokens, config)
    limits = "what the model's positions leave beside a completion" if tokens < longest else "for the longest prompt"
    notes = [note for note in own.notes if not note.startswith("pack_length is ")]
    notes.append(f"max_prompt_token_length is {tokens}, {limits}, and pack_length {found.parallel.pack_length}")
    return replace(found, provenance=replace(own, notes=tuple(notes)))


def _with_prompts_up_to(tokens: int, config: Config) -> Config:
    values = {"max_prompt_token_length": tokens}
    if not _is_given(config, "pack_length"):
        values["pack_length"] = tokens + config.rollout.response_length
    return build(flat(config) | values, config.provenance)


def _is_given(config: Config, name: str) -> bool:
    source = config.provenance.sources.get(name, "derived")
    return source != "derived" and not source.startswith("preset")


def counted(config: Config, num_prompts: int) -> Config:
    """`config` with `total_episodes` in place of `num_train_epochs`, and with steps in place of `provenance.due`.

    Args:
        num_prompts: training prompts, without those that are left out because they are too long.
    """
    passes, own = config.experiment.num_train_epochs, config.provenance
    prompts, samples = config.rollout.num_unique_prompts_rollout, config.rollout.num_samples_per_prompt_rollout
    values: dict[str, object] = {}
    notes, sources = list(own.notes), dict(own.sources)
    if passes is not None:
        # By the digits that were written: 0.29 x 100 is 29, and 28.999999999999996 as a float.
        episodes = int(Fraction(str(passes)) * num_prompts) * samples
        steps = episodes // (prompts * samples)
        values |= {"num_train_epochs": None, "total_episodes": episodes}
        sources["total_episodes"] = f"alias num_train_epochs ({sources.pop('num_train_epochs', 'default')})"
        notes.append(
            f"num_train_epochs={shown(passes)} -> total_episodes ({episodes}): {shown(passes)} x {num_prompts} prompts x "
            f"{samples} samples, {steps} {'step' if steps == 1 else 'steps'}"
        )
    steps = int(str(values.get("total_episodes", config.experiment.total_episodes))) // (prompts * samples)
    for name, share in sorted(own.due.items()):
        values[name] = max(num_prompts // prompts if share is None else ceil(Fraction(str(share)) * steps), 1)
        unit = f"a pass over {num_prompts} prompts" if share is None else f"{shown(share)} of {steps}"
        notes.append(f"{name} is {values[name]}, the steps of {unit}")
    provenance = replace(own, notes=tuple(notes), sources=sources, due={})
    return build(flat(config) | values, provenance)


def same_counts(config: Config, counts: list[int]) -> Config:
    """`config` with `counts_of` another rank's, which has counted the prompts."""
    return build(flat(config) | {"num_train_epochs": None} | dict(zip(COUNTED, counts, strict=True)), config.provenance)


def counts_of(config: Config) -> list[int]:
    """The values of `COUNTED`."""
    return [int(str(flat(config)[name])) for name in COUNTED]
