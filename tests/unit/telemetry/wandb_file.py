"""Reads what wandb recorded offline: records of protobuf in LevelDB's log format."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, FILE_HEADER, HEADER = 32768, 7, 7
FULL, LAST = 1, 4


def records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file, as far as they are whole."""
    from wandb.proto import wandb_internal_pb2

    data, place, body = path.read_bytes(), FILE_HEADER, b""
    assert data[:4] == b":W&B"
    while place + HEADER <= len(data):
        if BLOCK - place % BLOCK < HEADER:
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + HEADER])
        place += HEADER
        body += data[place : place + length]
        place += length
        if kind in (FULL, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(body)
            body = b""
            yield record


def values(items: Any) -> dict[str, Any]:
    """Keys and values of a part of a record."""
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def offline_runs(folder: Path) -> list[Path]:
    """The files of offline runs in a run's folder, oldest first."""
    return sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"))


def history(path: Path) -> list[dict[str, Any]]:
    """One dict of metrics for each step."""
    return [values(record.history.item) for record in records(path) if record.WhichOneof("record_type") == "history"]


def run(path: Path) -> Any:
    """The record that describes the run."""
    return next(record.run for record in records(path) if record.WhichOneof("record_type") == "run")
