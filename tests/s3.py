"""A real S3 server (moto) on this machine, in a process of its own, for as long as a with block."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import boto3

_SERVER = """
import sys
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server
app = DomainDispatcherApplication(create_backend_app)
server = make_server("127.0.0.1", 0, app, threaded=True)
print(server.socket.getsockname()[1], flush=True)
server.serve_forever()
"""


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket, and the variables of the environment that lead to it."""

    endpoint: str
    name: str

    @property
    def url(self) -> str:
        return f"s3://{self.name}"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE0001",
            "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI-example-secret",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            **self.through(self.endpoint),
        }

    @property
    def secrets(self) -> list[str]:
        """What nobody may see of the environment."""
        return [value for name, value in self.environment.items() if name.endswith(("KEY", "KEY_ID", "TOKEN"))]

    def through(self, endpoint: str) -> Mapping[str, str]:
        """The variables that lead to it by another endpoint, such as a proxy's."""
        return {"AWS_ENDPOINT_URL": endpoint}

    def client(self) -> Any:
        """Another client than the one under test."""
        return _client(self.endpoint)

    def put(self, key: str, data: bytes) -> None:
        self.client().put_object(Bucket=self.name, Key=key, Body=data)

    def get(self, key: str) -> bytes:
        found: bytes = self.client().get_object(Bucket=self.name, Key=key)["Body"].read()
        return found

    def delete(self, key: str) -> None:
        self.client().delete_object(Bucket=self.name, Key=key)

    def is_in_parts(self, key: str) -> bool:
        """Whether an object was put in several requests."""
        return "-" in self.client().head_object(Bucket=self.name, Key=key)["ETag"]

    def listed(self, prefix: str = "") -> list[str]:
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=prefix)
        return [item["Key"] for page in pages for item in page.get("Contents", ())]

    def tree(self, prefix: str) -> dict[str, str]:
        """SHA-256 of every object of a dataset, but for .build, as `conftest.tree` has it for folders."""
        names = [key.removeprefix(f"{prefix}/") for key in self.listed(f"{prefix}/")]
        return {
            name: hashlib.sha256(self.get(f"{prefix}/{name}")).hexdigest()
            for name in sorted(names)
            if not name.startswith(".build/")
        }


@functools.cache
def _client(endpoint: str) -> Any:
    keys = {"aws_access_key_id": "someone", "aws_secret_access_key": "else", "region_name": "us-east-1"}
    return boto3.client("s3", endpoint_url=endpoint, **keys)


@contextlib.contextmanager
def s3_server(program: str = _SERVER) -> Iterator[str]:
    """The endpoint of a server that holds its objects in memory. Its program tells the port."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": str(1 << 30)},  # it would put larger objects to the disk
    )
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def make_bucket(endpoint: str, name: str) -> Bucket:
    bucket = Bucket(endpoint, name)
    bucket.client().create_bucket(Bucket=name)
    return bucket
