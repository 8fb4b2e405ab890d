"""What wandb has on disk of a run: its process writes in blocks, and a kill loses what was not yet a whole one."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

_HEADER, _BLOCK, _PART = 7, 1 << 15, 7  # bytes of the file's head, of a block (LevelDB's log), of a part's head
_WHOLE, _LAST = 1, 4  # kinds of parts that end a record


def last_step(directory: Path) -> int:
    """The highest `progress/step` of any attempt's rows, -1 without any. `directory`: that of the run."""
    files = (directory / "wandb").glob("*run-*/*.wandb")
    return max((step for file in files for step in _steps(file)), default=-1)


def _steps(path: Path) -> Iterator[int]:
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    for record in _records(path.read_bytes()):
        for item in Record.FromString(record).history.item:
            if (item.key or "/".join(item.nested_key)) == "progress/step":
                yield json.loads(item.value_json)


def _records(content: bytes) -> Iterator[bytes]:
    """Those that are whole."""
    at, record = _HEADER, b""
    while at + _PART <= len(content):
        if _BLOCK - at % _BLOCK < _PART:  # what is too short for a head is filled up
            at += _BLOCK - at % _BLOCK
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        record += content[at + _PART : at + _PART + length]
        at += _PART + length
        if kind in (_WHOLE, _LAST) and at <= len(content):
            yield record
            record = b""
