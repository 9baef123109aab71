"""Read a torch.distributed.checkpoint folder without executing anything that it contains.

torch reads a checkpoint's tensors as data, but it unpickles the table of contents (``.metadata``)
and the values that are not tensors, such as a learning rate. A pickle can name any function and
have it called, so names are checked against a list first.

Source: https://docs.python.org/3/library/pickle.html#restricting-globals
"""

import io
import pickle
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

METADATA_FILE = ".metadata"
SAFE_GLOBALS = {
    "pathlib": "PosixPath WindowsPath",
    "torch": "Size",
    "torch.serialization": "_get_layout",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta"
        " TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING"
    ),
}
"""Names that a table of contents may contain, by module; torch's dtypes are allowed too."""


class SafeCheckpointReader(FileSystemReader):
    """Reads a checkpoint's table of contents, and refuses anything that is not data."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the table; raise pickle.UnpicklingError if it names anything but data."""
        with Path(self.path, METADATA_FILE).open("rb") as file:
            table: Metadata = _MetadataUnpickler(file).load()
        # As the base class does after it has unpickled the table.
        table.storage_meta = table.storage_meta or StorageMeta()
        table.storage_meta.load_id = self.load_id
        return table


class SafeLoadPlanner(DefaultLoadPlanner):
    """Loads values that are not tensors, if ``torch.load`` with ``weights_only`` accepts them."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # Raises pickle.UnpicklingError for anything but data; then torch may unpickle it.
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        # Python 3.11.0 to 3.11.3 pickle a member of an enum as getattr(its class, its name).
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        # The module's name in Python 3.13.
        module = "pathlib" if module == "pathlib._local" else module
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in SAFE_GLOBALS.get(module, "").split():
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f"{METADATA_FILE} names {module}.{name}, which is no part of a checkpoint: do not"
            " load it"
        )


def _enum_member(kind: Any, name: str) -> Any:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind[name]
    raise pickle.UnpicklingError(f"{METADATA_FILE} asks for {name} of {kind!r}: do not load it")
