"""The program that runs a reward model: `python -m mgrpo.rewards.reward_model_worker` (`json_lines`).

In:  {"folder": path, further arguments of `LoadedModel`}           -> {"ready": path}
     {"pairs": [[prompt, completion], ...]}                  -> {"scores": [x, ...]}
where prompt and completion are both text or both lists of messages. A failure is answered by {"error": text}.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mgrpo.processes.json_lines import Message, serve

_BATCH_SIZE = 16
_OF_BODY = re.compile(r"lora_|modules_to_save|base_layer|\.(layers?|h|blocks?)\.\d+\.")
_BUFFERS = ("inv_freq", "masked_bias", "attn.bias")
"""Tensors of layers that no score depends on. Other heads and poolers, outside of layers, are not part of a classifier either."""


def main() -> None:
    model: LoadedModel | None = None

    def answer(question: Message) -> Message:
        nonlocal model
        try:
            if "folder" in question:
                model = LoadedModel(**question)
                return {"ready": question["folder"]}
            assert model is not None, "no model was named"
            return {"scores": model.scores(question["pairs"])}
        except Exception as err:
            return {"error": f"{type(err).__name__}: {err}"}

    serve(answer)


class LoadedModel:
    """A sequence-classification model with its tokenizer, in float32 on the CPU, or in bfloat16 on the visible GPU."""

    def __init__(self, folder: str, chat_template_kwargs: Mapping[str, Any], *, on_gpu: bool = False) -> None:
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
            dtype=torch.bfloat16 if on_gpu else torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
        if loaded["missing_keys"]:
            missing = ", ".join(sorted(loaded["missing_keys"])[:3])
            raise ValueError(f"the checkpoint has no {missing}; random weights would give random rewards")
        if surplus := sorted(
            name for name in loaded["unexpected_keys"] if _OF_BODY.search(name) and not name.endswith(_BUFFERS)
        ):
            raise ValueError(
                f"the checkpoint holds {len(surplus)} tensors that the model does not read ({', '.join(surplus[:3])}); merge an "
                "adapter into the weights, or take the tensors out of the folder"
            )
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        # The logit is read at the last token other than this one.
        self._model.config.pad_token_id = self._tokenizer.pad_token_id
        self._device = "cuda" if on_gpu else "cpu"
        self._model.eval().to(self._device)

    def scores(self, pairs: Sequence[tuple[Any, Any]]) -> list[float]:
        """The one logit of each prompt + completion."""
        texts = [self._text(prompt, completion) for prompt, completion in pairs]
        # Texts of similar length share a batch, which keeps the padding small.
        order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
        scores = [0.0] * len(texts)
        for start in range(0, len(order), _BATCH_SIZE):
            places = order[start : start + _BATCH_SIZE]
            for place, score in zip(places, self._forward([texts[place] for place in places]), strict=True):
                scores[place] = score
        return scores

    def _text(self, prompt: Any, completion: Any) -> str:
        if isinstance(prompt, str):
            return prompt + completion
        return self._tokenizer.apply_chat_template(prompt + completion, tokenize=False, **self._chat_template_kwargs)

    def _forward(self, texts: list[str]) -> list[float]:
        import torch

        tokens = self._tokenizer(
            texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
        )
        with torch.inference_mode():
            return self._model(**tokens.to(self._device)).logits[:, 0].float().tolist()


if __name__ == "__main__":
    main()
