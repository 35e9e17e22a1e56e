"""`mgrpo.trl`: what a script of TRL hands over, and what it becomes."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest

import mgrpo
from mgrpo.config import ConfigError
from mgrpo.config.validate import problems as found_problems
from mgrpo.models.hf_files.checksums import SUMS, sum_problems, write_sums
from mgrpo.moving.config_doors import with_tools
from mgrpo.run.inputs.reading import read_inputs
from mgrpo.run.report.result import TrainResult
from mgrpo.run.report.upload import Uploads
from mgrpo.trl import AsyncGRPOConfig, AsyncGRPOTrainer, GRPOConfig, GRPOTrainer
from mgrpo.trl.arguments import placeholder_rows

ROWS = [{"prompt": "a"}, {"prompt": "b"}]
SCRIPTS = {
    "the shortest": {},
    "one GPU": {
        "output_dir": "out",
        "num_train_epochs": 1,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.3,
        "report_to": "none",
        "log_completions": True,
        "num_completions_to_print": 2,
        "top_p": 0.95,
        "optim": "adamw_8bit",
        "bf16": True,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "logging_steps": 10,
        "logging_strategy": "steps",
        "save_strategy": "epoch",
    },
    "an old one": {
        "use_vllm": False,
        "model_init_kwargs": {
            "torch_dtype": "bfloat16",
            "attn_implementation": "flash_attention_2",
            "use_cache": False,
        },
        "warmup_ratio": 0.1,
        "adam_beta1": 0.9,
        "adam_beta2": 0.99,
        "weight_decay": 0.1,
        "max_grad_norm": 0.1,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 4,
        "num_generations": 8,
        "max_prompt_length": 256,
        "max_completion_length": 786,
        "save_strategy": "steps",
        "save_steps": 100,
        "save_total_limit": 1,
        "do_eval": True,
        "eval_strategy": "epoch",
        "seed": 42,
        "remove_unused_columns": False,
        "overwrite_output_dir": True,
        "log_level": "info",
    },
}


@dataclasses.dataclass
class LoraConfig:
    """A part of peft's class."""

    r: int = 8
    lora_alpha: int = 8
    lora_dropout: float = 0.0
    target_modules: list[str] | str | set[str] | None = None
    bias: str = "none"
    task_type: str | None = None
    layers_to_transform: list[int] | None = None


LoraConfig.__module__ = "peft.tuners.lora.config"


def made(model="m", **arguments) -> GRPOTrainer:
    return GRPOTrainer(model, **{"reward_funcs": len, "train_dataset": ROWS, **arguments})


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_taken_as_they_are(name):
    """Every field that has to be removed by hand is one more reason not to try."""
    config = made(model="owner/model", args=GRPOConfig(**SCRIPTS[name])).config
    assert config.model.model_name_or_path == "owner/model"
    assert config.experiment.num_train_epochs == SCRIPTS[name].get("num_train_epochs", 3.0)


def test_what_the_fields_of_a_script_become():
    """A field that is accepted and lost trains something else."""
    old = made("m", args=GRPOConfig(**SCRIPTS["an old one"])).config
    assert old.model.model_dtype == "bfloat16" and old.provenance.due == {"local_eval_every": None}
    assert (old.rollout.num_unique_prompts_rollout, old.algorithm.num_mini_batches) == (4, 1)
    assert any(note.startswith("use_vllm has no effect") for note in old.notes)
    one = made("m", args=GRPOConfig(**SCRIPTS["one GPU"])).config
    assert (one.rollout.top_p, one.rollout.top_k, one.engine.vllm_mode) == (0.95, 64, "colocate")
    assert made("org/Name-1B").config.experiment.output_dir == "Name-1B-GRPO"
    limited = made("m", args={"max_steps": 10, "num_train_epochs": 3}).config
    assert limited.has_length and limited.num_optimizer_steps == 10
    for dtype, bf16, expected in (
        ("float32", True, "bfloat16"),
        ("bfloat16", False, "bfloat16"),
        ("float32", False, "float32"),
    ):
        args = {"bf16": bf16, "model_init_kwargs": {"dtype": dtype}}
        assert made("m", args=args).config.model.model_dtype == expected


def test_fields_that_were_given_are_attributes():
    """Scripts read them again, and change some after the fact."""
    args = GRPOConfig("out", beta=0.1)
    args.learning_rate = 3e-6
    assert (args.output_dir, args.beta) == ("out", 0.1)
    assert made("m", args=args).config.optimizer.learning_rate == 3e-6
    with pytest.raises(ConfigError, match="repetition_penalty"):
        GRPOConfig(repetition_penalty=1.1)


def test_everything_that_cannot_be_done_is_one_error():
    """One start for each would be many."""
    with pytest.raises(ConfigError) as caught:
        made(
            args={"repetition_penalty": 1.1},
            optimizers=(object(), None),
            quantization_config=object(),
            peft_config=LoraConfig(bias="all", layers_to_transform=[1]),
        )
    begins = [problem.split(" ")[0] for problem in caught.value.problems]
    assert begins == ["peft_config:", "peft_config:", "repetition_penalty=1.1", "optimizers", "quantization_config"]
    with pytest.raises(ConfigError, match="peft_config is str; adapters are LoRA"):
        made("m", peft_config="lora")


class Guessing:
    """An environment that gives prompts, and no reward."""

    def reset(self, **kwargs):
        return "Guess."


class Rewarding(Guessing):
    def guess(self, word: str) -> str:
        """Guess.

        Args:
            word: The word.
        """
        return "No."

    def get_reward(self):
        return 1.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"reward_funcs": None}, "No reward source provided"),
        ({"reward_funcs": None, "environment_factory": Guessing}, "No reward source provided"),
        ({"train_dataset": None}, "`train_dataset` is required"),
        ({"train_dataset": None, "environment_factory": Guessing}, "max_steps=None must be above 0"),
        ({"train_dataset": None, "environment_factory": {"a": Guessing}}, "requires a `train_dataset`"),
        ({"reward_processing_classes": [None, None]}, "must match the 1 of reward_funcs"),
        ({"args": GRPOConfig(logging_steps=0)}, "logging_steps=0 must be above 0"),
        ({"args": {"logging_steps": 0}}, "logging_steps=0 must be above 0"),
    ],
)
def test_what_trl_refuses_at_once_is_refused_at_once(arguments, words):
    """`train` is often called much later, in another process or after a model has been loaded."""
    with pytest.raises(ConfigError, match=words):
        made(**arguments)


@pytest.mark.parametrize("strategy", ["no", "epoch"])
def test_steps_between_lines_may_be_0_where_they_do_not_count(strategy):
    """As in transformers."""
    made(args=GRPOConfig(logging_steps=0, logging_strategy=strategy))


def test_rewards_and_prompts_may_come_from_elsewhere():
    """Rows that name verifiers, settings, and environments, which give both."""
    made(reward_funcs=None, train_dataset=[{"prompt": "a", "dataset": "math", "ground_truth": "1"}])
    made(reward_funcs=None, args={"reward_funcs": ["accuracy_reward"]})
    made(train_dataset=None, args={"dataset_mixer_list": ["rows.jsonl", "1.0"]})
    playing = {"train_dataset": None, "reward_funcs": None, "environment_factory": Rewarding}
    own = made(**playing, args={"max_steps": 2, "per_device_train_batch_size": 8, "num_generations": 4})
    inputs, problems = read_inputs(
        with_tools(own.config, {"environment_factory": Rewarding}), dataset=placeholder_rows(own.config)
    )
    assert problems == [] and len(inputs.train) == 2, "the rows of a step, without verifiers"


def test_a_streamed_dataset_is_read_by_one_process():
    """Rank 0; a script that asks for more is told, as by TRL."""
    own = made(train_dataset=iter(ROWS), args=GRPOConfig(dataloader_num_workers=4, max_steps=1))
    assert (own.args.dataloader_num_workers, own.args.accelerator_config.dispatch_batches) == (0, False)
    assert made(args=GRPOConfig(dataloader_num_workers=4)).args.dataloader_num_workers == 4
    asking = GRPOConfig(accelerator_config={"dispatch_batches": True})
    with pytest.raises(ConfigError, match="Iterable datasets require `dispatch_batches=False`"):
        made(train_dataset=iter(ROWS), args=asking)
    made(args=asking)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
def test_a_sequence_level_with_a_sum_over_tokens_is_said(loss_type, caplog):
    """Whoever means GSPO trains something else, and sees nothing of it."""
    made(args=GRPOConfig(importance_sampling_level="sequence", loss_type=loss_type))
    assert ("weights each sequence by its completion length" in caplog.text) == (loss_type != "grpo")


@pytest.mark.parametrize(
    ("targets", "expected"), [(None, ("q_proj", "v_proj")), ("all-linear", ("all-linear",)), ({"b", "a"}, ("a", "b"))]
)
def test_adapters_are_those_of_peft(targets, expected):
    """peft adapts two matrices of each layer where none are named, this project all of them."""
    config = made("m", peft_config=LoraConfig(r=4, lora_alpha=12, lora_dropout=0.05, target_modules=targets)).config
    adapter = config.adapter
    assert (adapter.use_peft, adapter.lora_r, adapter.lora_alpha) == (True, 4, 12)
    assert adapter.lora_target_modules == expected


def test_train_hands_everything_over_and_the_model_is_saved(tmp_path, monkeypatch):
    """Data, functions and the tokenizer are the script's; what is saved is the export."""
    exported = tmp_path / "hf" / "step_3"
    (exported / "adapter").mkdir(parents=True)
    for folder in (exported, exported / "adapter"):
        (folder / "config.json").write_text("{}")
        write_sums(folder)
    calls = []

    def train(config, **brought):
        calls.append((config, brought))
        return TrainResult(output_dir=tmp_path, steps=3, before={}, after={"eval/scores": 1.0}, exported=exported)

    class Tokenizer:
        def save_pretrained(self, folder):
            (Path(folder) / "tokenizer.json").write_text("{}")

    monkeypatch.setattr(mgrpo, "train", train, raising=False)
    trainer = GRPOTrainer(
        "m", len, GRPOConfig(str(tmp_path / "out")), [{"prompt": "a"}], [{"prompt": "b"}], processing_class=Tokenizer()
    )
    with pytest.raises(RuntimeError, match="call train"):
        trainer.save_model()
    output = trainer.train(resume_from_checkpoint=True)
    assert output.global_step == trainer.state.global_step == trainer.result.steps == 3
    config, brought = calls[0]
    assert (
        config.checkpoint.resume == "auto" and (Path(config.data.tokenizer_name_or_path) / "tokenizer.json").is_file()
    )
    assert (brought["reward_funcs"], brought["dataset"], brought["eval_dataset"]) == (
        [len],
        [{"prompt": "a"}],
        [{"prompt": "b"}],
    )
    trainer.save_model(str(tmp_path / "final"))
    assert (tmp_path / "final" / "config.json").is_file()
    # The usual idiom goes on with the tokenizer.
    Tokenizer().save_pretrained(tmp_path / "final")
    (tmp_path / "final" / "config.json").write_text('{"pad_token_id": 0}')
    assert not [
        *sum_problems(tmp_path / "final"),
        *sum_problems(tmp_path / "final" / "adapter"),
        *sum_problems(exported),
    ]
    assert (exported / SUMS).is_file()
    with pytest.raises(AttributeError, match="has no accelerator; it has"):
        trainer.accelerator  # noqa: B018


@pytest.fixture
def evaluating(tmp_path, monkeypatch):
    """A trainer whose runs and evaluations do nothing but report rising numbers, and the folders in which its model is written."""
    result = TrainResult(output_dir=tmp_path, steps=3, before={}, after={}, exported=tmp_path / "hf" / "step_3")
    numbers = itertools.count(1)

    def report(config, *, listener, **_):
        listener.evaluated = {"eval_reward": float(next(numbers))}
        return result

    monkeypatch.setattr(mgrpo, "train", report, raising=False)
    monkeypatch.setattr(mgrpo, "evaluate", report, raising=False)
    trainer = made(args=GRPOConfig(str(tmp_path / "out")), eval_dataset=ROWS)
    written: list[Path] = []
    monkeypatch.setattr(trainer._policy, "write", lambda folder, beta: written.append(folder))
    return trainer, written


def test_the_evaluation_after_training_stays_that(evaluating):
    """The numbers of other rows in between would pass for those of the trainer's."""
    trainer, _ = evaluating
    trainer.train()
    assert trainer.evaluate() == {"eval_reward": 1.0}
    assert trainer.evaluate(ROWS[:1]) == {"eval_reward": 2.0}
    assert trainer.evaluate() == {"eval_reward": 1.0}


def test_a_loaded_model_is_written_for_those_who_read_it(evaluating):
    """It may be many gigabytes; after training its folder is read by the next training only."""
    trainer, written = evaluating
    trainer.evaluate()
    assert len(written) == 1
    trainer.train()
    trainer.evaluate(ROWS[:1])
    assert len(written) == 2
    trainer.train()
    assert len(written) == 3


def test_ranks_do_not_run_ahead_of_an_evaluation(evaluating, monkeypatch):
    """Those that enter `train` wait there no longer than learner_timeout, and an evaluation starts engines first."""
    trainer, written = evaluating
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(ValueError, match="evaluate before train needs one rank"):
            trainer.evaluate()
    assert not written
    trainer.train()
    assert trainer.evaluate(ROWS[:1]) == {}


def test_the_trained_model_is_pushed_once(tmp_path, monkeypatch):
    """Scripts of TRL end with push_to_hub: after a run that has uploaded it must not upload again, else it must."""
    last, best = (tmp_path / "hf" / name for name in ("step_3", "step_2"))
    for folder in (last, best):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(folder.name)
    result = TrainResult(output_dir=tmp_path, steps=3, before={}, after={}, exported=last, best=best)
    monkeypatch.setattr(mgrpo, "train", lambda *_, **__: result, raising=False)
    monkeypatch.setenv("HF_TOKEN", "of-a-test")
    started = []
    monkeypatch.setattr(
        Uploads, "_start", lambda self, *words: started.append((self.repository, self.settings, *words))
    )

    trainer = made("m", args=GRPOConfig(str(tmp_path / "out"), hub_model_id="me/mine"))
    trainer.train()
    trainer.push_to_hub("First", dataset_name="d")
    trainer.push_to_hub(revision="other")
    assert [(name, folder, message) for name, _, folder, message, _ in started] == [
        ("me/mine", best, "First"), ("me/mine", best, "The trained model, after 2 steps"),
    ]  # fmt: skip
    assert [hub.hub_revision for _, hub, *_ in started] == [None, "other"]
    trainer.save_model(str(tmp_path / "final"))
    assert (tmp_path / "final" / "config.json").read_text() == "step_2"

    pushes = made("m", args=GRPOConfig(str(tmp_path / "out"), push_to_hub=True))
    pushes.train()
    pushes.push_to_hub()
    assert len(started) == 2
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(RuntimeError, match="there is no token"):
        trainer.push_to_hub()


def test_the_revision_of_a_model_is_kept():
    """Another commit of the same name is another model."""
    kwargs = {"revision": "v2", "torch_dtype": "float16"}
    config = made("owner/m", args={"bf16": False, "fp16": True, "model_init_kwargs": kwargs}).config
    assert (config.hub.model_revision, config.model.model_dtype) == ("v2", "float16")
    assert made("owner/m", args={"model_init_kwargs": {"revision": None}}).config.hub.model_revision is None


@pytest.mark.parametrize(
    ("kwargs", "end"), [({"min_lr": 1e-7}, 1e-7), ({"min_lr_rate": 0.1}, 5e-7), ('{"min_lr": 2e-7}', 2e-7), ({}, 0.0)]
)
def test_a_schedule_ends_where_the_script_says(kwargs, end):
    """The last tenth of a run with a rate of 0 learns nothing."""
    args = {"learning_rate": 5e-6, "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": kwargs}
    config = made("m", args=args).config
    assert config.optimizer.min_lr == pytest.approx(end)
    found = [problem for problem in found_problems(config, world_size=1) if "min_lr" in problem]
    assert bool(found) != bool(end) and all("cosine_with_min_lr needs min_lr above 0" in problem for problem in found)
    with pytest.raises(ConfigError, match="lr_scheduler_kwargs: num_cycles=2 is refused"):
        GRPOConfig(lr_scheduler_kwargs={"num_cycles": 2})
    (above,) = [
        p
        for p in found_problems(made("m", args=args | {"lr_scheduler_kwargs": {"min_lr": 1}}).config, world_size=1)
        if "min_lr" in p
    ]
    assert above.startswith("min_lr=1 is above learning_rate=5e-06")


def test_a_script_of_the_asynchronous_trainer_moves_by_its_imports():
    """The arguments stand in its order, and the run has its defaults: with the other trainer's it would take turns."""
    trainer = AsyncGRPOTrainer("owner/model", len, AsyncGRPOConfig("out", max_staleness=2), ROWS)
    assert (trainer.config.max_age, trainer.config.rollout.response_length) == (2, 2048)
    assert trainer.args.logging_steps == 1 and trainer.config.experiment.output_dir == "out"
    plain = AsyncGRPOTrainer("owner/model", len, train_dataset=ROWS)
    assert (plain.config.max_age, plain.config.experiment.output_dir) == (4, "model-AsyncGRPO")
    assert GRPOTrainer("owner/model", len, AsyncGRPOConfig("out"), ROWS).config.max_age == 4
    with pytest.raises(ConfigError) as caught:
        AsyncGRPOTrainer("owner/model", len, GRPOConfig("out"), ROWS, rollout_worker=object(), weight_transfer=object())
    assert [problem.split(" ")[0] for problem in caught.value.problems] == ["rollout_worker", "weight_transfer", "args"]
