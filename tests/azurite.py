"""Azurite, the emulator of Azure's blobs by its vendor, and a container in it with the bucket's interface."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from azure.storage.blob import ContainerClient

from s3 import Bucket

PROGRAM = Path(__file__).parent.parent / ".venv-azurite/node_modules/.bin/azurite-blob"
ACCOUNT = "millaccount"
KEY = "dG9rZW5taWxsLWV4YW1wbGUtYWNjb3VudC1rZXktMDE="
# Clients are ahead of the versions that it knows, so it does not ask; whatever else it does not know is an error.
_OPTIONS = ("--blobPort", "0", "--inMemoryPersistence", "--skipApiVersionCheck", "--silent", "--disableTelemetry")


class Container(Bucket):
    """A container, and the variables of the environment that lead to it."""

    @property
    def url(self) -> str:
        return f"az://{self.name}"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
            **self.through(self.endpoint),
        }

    def through(self, endpoint: str) -> Mapping[str, str]:
        return {"AZURE_STORAGE_ENDPOINT": f"{endpoint}/{ACCOUNT}"}

    def client(self) -> ContainerClient:
        return _client(self.endpoint, self.name)

    def put(self, key: str, data: bytes) -> None:
        self.client().upload_blob(key, data, overwrite=True)

    def get(self, key: str) -> bytes:
        found: bytes = self.client().download_blob(key).readall()
        return found

    def delete(self, key: str) -> None:
        self.client().delete_blob(key)

    def is_in_parts(self, key: str) -> bool:
        committed: list[Any] = self.client().get_blob_client(key).get_block_list()[0]
        return len(committed) > 1

    def listed(self, prefix: str = "") -> list[str]:
        return list(self.client().list_blob_names(name_starts_with=prefix))


@functools.cache
def _client(endpoint: str, name: str) -> ContainerClient:
    return ContainerClient(f"{endpoint}/{ACCOUNT}", name, credential={"account_name": ACCOUNT, "account_key": KEY})


@contextlib.contextmanager
def azure_server() -> Iterator[str]:
    """The endpoint of a server that holds its blobs in memory, and knows one account."""
    process = subprocess.Popen(
        [PROGRAM, *_OPTIONS],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"},
    )
    try:
        assert process.stdout is not None
        yield next(found[0] for line in process.stdout if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def make_container(endpoint: str, name: str) -> Container:
    container = Container(endpoint, name)
    container.client().create_container()
    return container
