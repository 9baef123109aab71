"""Reads a folder that torch.distributed.checkpoint wrote as data alone: whoever made it, nothing in
it is executed.

torch reads the tensors of a checkpoint so, but unpickles its table of contents (``.metadata``) and
what is no tensor, such as a learning rate, without looking. A pickle can name any function and have
it called, so what these two name is held against a list first.

Source: https://docs.python.org/3/library/pickle.html#restricting-globals
"""

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

METADATA_FILE = ".metadata"
SAFE_GLOBALS = {
    "pathlib": {"PosixPath", "WindowsPath"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}
"""What a table of contents is made of, by module; dtypes as well."""


class SafeCheckpointReader(FileSystemReader):
    """Reads a checkpoint's table of contents, unless it is more than that."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The table. Raises pickle.UnpicklingError where it names anything that is no data."""
        with Path(self.path, METADATA_FILE).open("rb") as file:
            table: Metadata = _MetadataUnpickler(file).load()
        table.storage_meta = table.storage_meta or StorageMeta()
        table.storage_meta.load_id = self.load_id
        return table


class SafeLoadPlanner(DefaultLoadPlanner):
    """Reads what is no tensor, unless it is no data either."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Raises pickle.UnpicklingError for what torch.load refuses with ``weights_only``."""
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in SAFE_GLOBALS.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f"{METADATA_FILE} names {module}.{name}, which is no part of a checkpoint: do not"
            " load it"
        )
