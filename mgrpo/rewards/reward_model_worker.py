"""The program that runs a reward model: `python -m mgrpo.rewards.reward_model_worker`, JSON lines on stdin and stdout.

In:  {"folder": path, "chat_template_kwargs": {...}}         -> {"ready": path}
     {"pairs": [[prompt, completion], ...]}                  -> {"scores": [x, ...]}
where prompt and completion are both text or both lists of messages. Whatever fails is answered by {"error": text}.
It ends with its input, and with its parent.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from mgrpo.processes.lifetime import die_with_parent

_BATCH_SIZE = 16


def main() -> None:
    die_with_parent()
    # What libraries print goes to stderr.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    model: Model | None = None
    with os.fdopen(os.dup(0), "rb") as questions:
        for line in questions:
            question = json.loads(line)
            try:
                if "folder" in question:
                    model = Model(question["folder"], question["chat_template_kwargs"])
                    answer = {"ready": question["folder"]}
                else:
                    assert model is not None, "no model was named"
                    answer = {"scores": model.scores(question["pairs"])}
            except Exception as err:
                answer = {"error": f"{type(err).__name__}: {err}"}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


class Model:
    def __init__(self, folder: str, chat_template_kwargs: dict) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer
        from transformers.utils import logging

        torch.set_num_threads(1)
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self._chat_template_kwargs = chat_template_kwargs
        self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        self._model, loaded = AutoModelForSequenceClassification.from_pretrained(
            folder,
            num_labels=1,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
        if loaded["missing_keys"]:
            missing = ", ".join(sorted(loaded["missing_keys"])[:3])
            raise ValueError(f"the checkpoint has no {missing}; random weights would be no reward")
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        # The logit is read at the last token that is not this one.
        self._model.config.pad_token_id = self._tokenizer.pad_token_id
        self._model.eval()

    def scores(self, pairs: Sequence[tuple]) -> list[float]:
        texts = [self._text(prompt, completion) for prompt, completion in pairs]
        # Texts of one length share a batch, for little padding.
        order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
        scores = [0.0] * len(texts)
        for start in range(0, len(order), _BATCH_SIZE):
            places = order[start : start + _BATCH_SIZE]
            for place, score in zip(places, self._forward([texts[place] for place in places]), strict=True):
                scores[place] = score
        return scores

    def _text(self, prompt: str | list[dict], completion: str | list[dict]) -> str:
        if isinstance(prompt, str):
            return prompt + completion
        return self._tokenizer.apply_chat_template(prompt + completion, tokenize=False, **self._chat_template_kwargs)

    def _forward(self, texts: list[str]) -> list[float]:
        import torch

        tokens = self._tokenizer(
            texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
        )
        with torch.inference_mode():
            return self._model(**tokens).logits[:, 0].float().tolist()


if __name__ == "__main__":
    main()
