"""The model that a trainer trains: as the script gives it, as the folder that ranks and engines read, and as an object again."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgrpo.models.hf_config import is_on_hub
from mgrpo.models.hf_files.hub import fetch
from mgrpo.models.peft import ADAPTER
from mgrpo.moving import grpo_config
from mgrpo.trl.loaded import is_model, name_of, written

if TYPE_CHECKING:
    import torch

LORA_NAMES = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "target_modules": "lora_target_modules",
    "target_parameters": "lora_target_parameters",
    "modules_to_save": "lora_modules_to_save",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
    "init_lora_weights": "init_lora_weights",
}
"""Names of peft's LoraConfig here."""
WITHOUT_EFFECT = (
    "peft_type",
    "peft_version",
    "task_type",
    "base_model_name_or_path",
    "inference_mode",
    "runtime_config",
)
"""Fields of LoraConfig without effect on training."""
PEFT_TARGETS = ("q_proj", "v_proj")
"""The modules that peft adapts in the models of this project where target_modules is None."""

_log = logging.getLogger(__name__)


class PolicyModel:
    """A name, a folder, or an object of transformers or peft; perhaps with adapters."""

    def __init__(self, given: Any, peft_config: Any = None) -> None:
        self.given, self.name = given, name_of(given)
        self.is_loaded = is_model(given)
        self.has_adapter = self.is_loaded and hasattr(given, "peft_config") and hasattr(given, "get_base_model")
        """True for a PeftModel."""
        self.peft_config = given.peft_config.get("default") if self.has_adapter else peft_config
        self.extra_config = peft_config if self.has_adapter else None
        self.trained: Path | None = None
        """The folder of the trained model."""
        # A bare model gets its adapters on access to the object.
        self._object: Any = given if self.has_adapter or (self.is_loaded and peft_config is None) else None

    def settings(self, folder: Path, *, has_tokenizer: bool) -> tuple[dict[str, object], list[str]]:
        """Settings for this model, and the reasons why parts of it are not supported.

        Args:
            folder: the target of `write` for a loaded model.
            has_tokenizer: the script gives one; else it is that of the model's name.
        """
        settings, problems = lora_settings(self.peft_config)
        settings["model_name_or_path"] = str(folder / "model") if self.is_loaded else str(self.given)
        if self.is_loaded and not has_tokenizer:
            settings["tokenizer_name_or_path"] = self.given.config._name_or_path
            if not self.given.config._name_or_path:
                problems.append(
                    "model is an object without a name, by which its tokenizer would be found; give processing_class"
                )
        if self.has_adapter:
            settings["lora_adapter_path"] = str(folder / ADAPTER)
            if self.peft_config is None:
                problems.append(f"model has the adapters {', '.join(self.given.peft_config)}; expected one, default")
        if self.extra_config is not None:
            problems.append(
                "peft_config beside a PeftModel is not supported: it has an adapter already; give the one or the other"
            )
        return settings, problems

    def write(self, folder: Path, *, beta: float) -> None:
        """Write a loaded model, which all ranks then read. Every rank must call."""
        if not self.is_loaded:
            return
        written(self._write_base, folder / "model")
        if self.has_adapter:
            written(self.given.save_pretrained, folder / ADAPTER)
            if beta and any(weight.any() for name, weight in self.given.named_parameters() if ".lora_B." in name):
                _log.warning(
                    "the reference of beta=%g is the model without its adapter, where TRL's is the model with the adapter as "
                    "it was given; merge it into the weights (merge_and_unload) to have that",
                    beta,
                )

    def load(self, revision: str | None) -> Any:
        """The object: with the trained weights once there are some, before that as it was given.

        Args:
            revision: of a name on the Hub.
        """
        if self._object is None:
            source = self.trained if self.trained and self.peft_config is None else self.given
            self._object = source if self.is_loaded else _from_folder(source, revision)
            if self.peft_config is not None:
                import peft

                self._object = peft.get_peft_model(self._object, dataclasses.replace(self.peft_config))
                self._take_adapter()
        return self._object

    def take(self, folder: Path) -> None:
        """Set the trained model's folder; an object that the script holds gets its weights, as TRL trains in place."""
        self.trained = folder
        if self._object is None:
            return
        if self.peft_config is not None:
            self._take_adapter()
        else:
            self._object.load_state_dict(_from_folder(folder).state_dict())

    def _take_adapter(self) -> None:
        if self.trained is not None:
            import peft

            weights = peft.utils.load_peft_weights(str(self.trained / ADAPTER), device="cpu")
            peft.set_peft_model_state_dict(self._object, weights)

    def _write_base(self, folder: Path) -> None:
        model = self.given.get_base_model() if self.has_adapter else self.given
        model.save_pretrained(folder, state_dict=dict(_base_weights(model.state_dict())))


def lora_settings(config: Any) -> tuple[dict[str, object], list[str]]:
    """Settings for adapters as peft's LoraConfig describes them, none without one; and fields without counterpart here, as problems."""
    if config is None:
        return {}, []
    if not dataclasses.is_dataclass(config) or isinstance(config, type) or not hasattr(config, "lora_alpha"):
        return {}, [f"peft_config is {type(config).__name__}; adapters are LoRA, give a peft.LoraConfig"]
    problems = [
        f"peft_config: {name}={value!r} is not supported"
        for name, value in sorted(grpo_config.changed_fields(config, package="peft").items())
        if name not in (*LORA_NAMES, *WITHOUT_EFFECT)
    ]
    given = {ours: getattr(config, name, None) for name, ours in LORA_NAMES.items()}
    targets = given["lora_target_modules"]
    if not isinstance(targets, str):
        given["lora_target_modules"] = tuple(sorted(targets)) if targets else PEFT_TARGETS
    return {"use_peft": True} | {name: value for name, value in given.items() if value is not None}, problems


def _base_weights(weights: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a model under their own names, without the adapters that peft has put among them."""
    for name, tensor in weights.items():
        if not any(part.startswith("lora_") for part in name.split(".")):
            yield name.replace(".base_layer.", "."), tensor


def _from_folder(source: str | Path, revision: str | None = None) -> Any:
    from transformers import AutoModelForCausalLM

    folder = fetch(str(source), revision=revision).folder if is_on_hub(str(source)) else source
    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32", use_safetensors=True)
