"""Upstream's example connector, that keeps KV in files, with a way to drop them."""

import shutil
from pathlib import Path

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import (
    ExampleConnector,
)


class DroppingConnector(ExampleConnector):
    """Drops its files when its cache is reset."""

    def reset_cache(self) -> bool:
        for folder in Path(self._storage_path).iterdir():
            shutil.rmtree(folder)
        return True


class KeepingConnector(ExampleConnector):
    """Says that it cannot drop them now."""

    def reset_cache(self) -> bool:
        return False
