"""Reward models in their own process, against transformers' forward in this one."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mgrpo.rewards.function_catalog import check_functions, close_functions, load_functions, start_functions
from mgrpo.rewards.reward_functions import function_names
from mgrpo.rewards.reward_model import RewardModel, check_reward_model
from mgrpo.rewards.reward_model_worker import LoadedModel

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ tail or '' }}\n{% endfor %}"
PROMPTS = ["2+3=", "a much longer prompt: ", "x"]
COMPLETIONS = ["5", "and a completion that is longer than the others, too", ""]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _save(tmp_path_factory.mktemp("models") / "tiny-reward")


def _environment(pid: int | None) -> bytes:
    """The environment that a process was started with. Linux shows it a moment after the program has begun."""
    for _ in range(200):
        if shown := Path(f"/proc/{pid}/environ").read_bytes():
            return shown
        time.sleep(0.01)
    return b""


def _save(folder: Path, *, family: str = "Llama") -> Path:
    """A random model with a tokenizer of bytes, whose logits differ from text to text."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={"</s>": 0} | {c: i + 1 for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 0)])
    torch.manual_seed(0)
    shape = {
        "Llama": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
        "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    }
    config = getattr(transformers, f"{family}Config")(vocab_size=len(letters) + 1, num_labels=1, **shape[family])
    model = getattr(transformers, f"{family}ForSequenceClassification")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    model.save_pretrained(folder)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


def _oracle(folder: Path, texts: list[str]) -> list[float]:
    """One text at a time, so without padding."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return [
            model(**tokenizer(text, return_tensors="pt", add_special_tokens=False)).logits[0, 0].item()
            for text in texts
        ]


def test_scores_are_those_of_transformers(folder: Path) -> None:
    """Padding that is scored, another order, or special tokens twice would give every text a stranger's reward."""
    (model,) = load_functions([str(folder)], max_completion_length=10)
    assert function_names([model]) == ["tiny-reward"]
    start_functions([model, len])
    assert model.pid is not None
    try:
        expected = _oracle(folder, [p + c for p, c in zip(PROMPTS, COMPLETIONS, strict=True)])
        found = model(prompts=PROMPTS, completions=COMPLETIONS, completion_ids=[[1]] * 3, trainer_state=None)
        assert found == pytest.approx(expected, abs=1e-5)
        assert max(found) - min(found) > 0.1
        # More than a batch, in any order.
        many = [(f"{i}+", "1" * (i * 7 % 40)) for i in range(40)]
        expected = _oracle(folder, [p + c for p, c in many])
        assert model([p for p, _ in many], [c for _, c in many]) == pytest.approx(expected, abs=1e-5)
        # Rows of messages, beside rows of text.
        messages = [{"role": "user", "content": "2+3"}]
        answer = [{"role": "assistant", "content": "5"}]
        expected = _oracle(folder, ["<user>2+3\n<assistant>5\n", "2+35"])
        assert model([messages, "2+3"], [answer, "5"]) == pytest.approx(expected, abs=1e-5)
        assert model([], []) == []
        pid = model.pid
    finally:
        close_functions([model])
    assert model.pid is None and not Path(f"/proc/{pid}").exists()


def test_the_chat_template_gets_its_variables(folder: Path) -> None:
    """chat_template_kwargs go to every template of the run."""
    found = LoadedModel(str(folder), {"tail": "!"}).scores(
        [([{"role": "user", "content": "a"}], [{"role": "assistant", "content": "b"}])]
    )
    assert found == pytest.approx(_oracle(folder, ["<user>a!\n<assistant>b!\n"]), abs=1e-5)


def test_tensors_that_the_model_does_not_read_are_refused(tmp_path: Path) -> None:
    """An adapter that nobody merged leaves the scores of its base."""
    from safetensors.torch import load_file, save_file

    folder = _save(tmp_path / "adapted")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": torch.zeros(257, 32)}, folder / "model.safetensors", {"format": "pt"})
    assert len(LoadedModel(str(folder), {}).scores([("2+3=", "5")])) == 1
    name = "model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file(tensors | {name: torch.zeros(4, 32)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"holds 1 tensors that the model does not read .{name}"):
        LoadedModel(str(folder), {})


def test_padding_does_not_move_the_text(tmp_path: Path) -> None:
    """A model with learned positions gives a text another score when padding stands before it."""
    folder = _save(tmp_path / "gpt2", family="GPT2")
    texts = ["a", "ab" * 20, "abc" * 7]
    assert LoadedModel(str(folder), {}).scores([(text, "") for text in texts]) == pytest.approx(
        _oracle(folder, texts), abs=1e-5
    )


def test_a_checkpoint_without_the_head_is_refused(tmp_path: Path) -> None:
    """transformers would draw the missing weights at random, and the run would follow noise."""
    from safetensors.torch import load_file, save_file

    folder = _save(tmp_path / "headless")
    weights = load_file(folder / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"the checkpoint has no score\.weight"):
        LoadedModel(str(folder), {})


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardModel]:
    """A model whose head is NaN. Its process is started by who needs it."""
    from safetensors.torch import load_file, save_file

    folder = _save(tmp_path_factory.mktemp("models") / "broken")
    weights = load_file(folder / "model.safetensors")
    weights["score.weight"].fill_(math.nan)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model = RewardModel(folder)
    yield model
    model.close()


def test_a_process_that_dies_is_an_error_with_the_models_name(broken: RewardModel) -> None:
    """No scores, or those of an earlier question, would train on noise."""
    broken.start()
    os.kill(broken.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="broken died of SIGKILL"):
        broken(["a"], ["b"])
    assert broken.pid is None


def test_a_model_without_a_number_is_a_warning_once(broken: RewardModel, caplog: pytest.LogCaptureFixture) -> None:
    """No completion has a reward then, and the run goes on with nothing to learn; somebody must be told, not each step."""
    for _ in range(2):
        assert all(map(math.isnan, broken(["a", "b"], ["c", "d"])))
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "broken gave NaN for 2 of 2 completions" in warning


def test_a_failure_of_the_process_is_an_error_with_the_models_name(broken: RewardModel) -> None:
    """A completion that the template cannot render. The process may still hold the question, and ends."""
    with pytest.raises(RuntimeError, match=r"reward model .*broken failed: TypeError"):
        broken([[{"role": "user", "content": "a"}]], ["no messages"])
    assert broken.pid is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU the worker says which device it was asked for")
def test_a_reward_model_may_have_a_gpu_of_its_own(folder: Path) -> None:
    """A core scores a model of 1B for minutes a step, while learners and engines wait."""
    model = RewardModel(folder, gpu=3)
    try:
        with pytest.raises(RuntimeError, match=r"tiny-reward failed: .*(CUDA|NVIDIA driver)"):
            model(["a"], ["b"])
        model.start()
        assert b"CUDA_VISIBLE_DEVICES=3\0" in _environment(model.pid)
    finally:
        model.close()


def test_closing_does_not_wait_for_a_model_that_is_stuck(folder: Path) -> None:
    """The end of a run, also one that failed elsewhere, would hang with its devices held."""
    model = RewardModel(folder)
    failures: list[Exception] = []

    def score() -> None:
        try:
            model(["a"], ["b"])
        except Exception as err:
            failures.append(err)

    scoring = threading.Thread(target=score, daemon=True)
    closing = threading.Thread(target=model.close, daemon=True)
    model.start()
    pid = model.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        scoring.start()
        while not model._lock.locked():
            time.sleep(0.01)
        closing.start()
        for thread in (closing, scoring):
            thread.join(30)
        assert not closing.is_alive() and not scoring.is_alive()
        assert model.pid is None and not Path(f"/proc/{pid}").exists()
        assert [type(failure) for failure in failures] == [RuntimeError]
    finally:
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGKILL)


def test_what_is_no_reward_model_is_refused_before_the_start(folder: Path, tmp_path: Path) -> None:
    """The error belongs beside those of the configuration, not into the first step."""

    def refused(change: object) -> str:
        copy = tmp_path / f"copy{len(list(tmp_path.iterdir()))}"
        copy.mkdir()
        for file in folder.iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
        change(copy)
        (problem,) = check_functions([str(copy)])
        return problem

    def edited(**values: object) -> object:
        def change(copy: Path) -> None:
            config = json.loads((copy / "config.json").read_text()) | values
            (copy / "config.json").write_text(json.dumps(config))

        return change

    assert "architectures is LlamaForCausalLM" in refused(edited(architectures=["LlamaForCausalLM"]))
    assert "architectures is missing" in refused(edited(architectures=None))
    assert "it has 3 labels" in refused(edited(id2label={"0": "a", "1": "b", "2": "c"}))
    assert "config.json cannot be read" in refused(lambda copy: (copy / "config.json").write_text("{"))
    assert "no safetensors" in refused(lambda copy: (copy / "model.safetensors").rename(copy / "pytorch_model.bin"))
    assert "no tokenizer" in refused(lambda copy: [file.unlink() for file in copy.glob("tokenizer*")])
    check_reward_model(folder)


def test_the_worker_ends_with_its_parent(folder: Path) -> None:
    """A killed run must not leave a model in memory."""
    code = (
        "import os, sys; from mgrpo.rewards.reward_model import RewardModel;"
        f"m = RewardModel({str(folder)!r}); m(['a'], ['b']); print(m.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    deadline = time.monotonic() + 30
    while Path(f"/proc/{ended.stdout.strip()}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{ended.stdout.strip()}").exists()
