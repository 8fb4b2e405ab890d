"""Rows of Hugging Face data sets: by hub id, from a local folder, or streamed. The library is loaded when needed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from olmorl.config.data_sections import SourceSection
from olmorl.contract.errors import DataError
from olmorl.data.rows import Row


def read_hugging_face(source: SourceSection) -> Iterator[tuple[str, Row]]:
    """Yield (place, row). Raises DataError."""
    import datasets

    try:
        for number, row in enumerate(_open(source), 1):
            yield f"{source.path}:row {number}", dict(row)
    except (datasets.exceptions.DatasetsError, ValueError, OSError) as error:
        cause = error.__cause__ or error  # of what broke a row the library says no more than that something did
        reason = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
        raise DataError(f"{source.path}: cannot be read as a Hugging Face data set: {reason}") from None


def _open(source: SourceSection) -> Any:
    import datasets

    folder = Path(source.path)
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():  # made by save_to_disk
        saved = datasets.load_from_disk(source.path)
        if isinstance(saved, datasets.DatasetDict):
            if source.split not in saved:
                raise ValueError(f"there is no split {source.split!r}; there are {', '.join(saved)}")
            return saved[source.split]
        return saved
    return datasets.load_dataset(source.path, source.subset, split=source.split, streaming=source.streaming)
