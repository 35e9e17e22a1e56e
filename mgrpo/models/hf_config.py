"""config.json of a Hugging Face checkpoint folder, and the forms of a model's name."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HfConfig = Mapping[str, Any]


def read_hf_config(model_dir: str | Path) -> dict[str, Any]:
    """Read config.json of a Hugging Face checkpoint folder; a ValueError names the problem."""
    path = Path(model_dir) / "config.json"
    if not model_dir or not path.is_file():
        raise ValueError(no_model(model_dir))
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as err:
        raise ValueError(f"{model_dir} has a config.json that cannot be read: {err}") from err
    if not isinstance(config, dict):
        raise ValueError(f"{model_dir} has a config.json that holds {type(config).__name__}; expected an object")
    return config


def no_model(model_dir: str | Path) -> str:
    """An error about a place without config.json, which begins with the place."""
    folder, name = Path(model_dir), str(model_dir)
    if folder.is_dir():
        exports = [path.parent for path in (*folder.glob("step_*/config.json"), *folder.glob("hf/step_*/config.json"))]
        if exports:
            newest = max(exports, key=lambda path: int("0" + "".join(filter(str.isdecimal, path.name))))
            return f"{name} has no config.json; did you mean {newest}?"
        if (folder / "adapter_config.json").is_file():
            return f"{name} is an adapter without its model; give the model, and this folder as lora_adapter_path"
        return f"{name} has no config.json; give the folder of a Hugging Face checkpoint"
    if is_hub_name(name):
        return f"{name} is not a folder here, and has not been looked for on the Hub"
    return f"{name} is not a folder; check the path (it is used as given, ~ is not expanded)"


def is_hub_name(name: str) -> bool:
    """True if the name reads like OWNER/NAME on the Hub, not like a path."""
    return name.count("/") == 1 and not name.startswith(("/", ".", "~")) and not name.endswith("/")


def is_on_hub(name: str) -> bool:
    """True for a Hub name without a file or folder of the same path on this machine, which would take precedence."""
    return is_hub_name(name) and not os.path.exists(name)
