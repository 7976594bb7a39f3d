"""The servers that the tests with a bucket can run against; pytest --store names one.

s3   moto, always
gs   moto with Google's language before it: see gcs.py for what it does not show
az   Azurite, the vendor's own emulator: a program of Node's, which `make stores` installs
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

from s3 import Bucket, make_bucket, s3_server


@contextlib.contextmanager
def bucket_server(scheme: str) -> Iterator[Callable[[str], Bucket]]:
    """What makes a bucket of this kind, for as long as its server runs."""
    if scheme == "gs":
        from gcs import google_server, make_google_bucket

        with google_server() as endpoint:
            yield partial(make_google_bucket, endpoint)
    elif scheme == "az":
        from azurite import azure_server, make_container

        with azure_server() as endpoint:
            yield partial(make_container, endpoint)
    else:
        with s3_server() as endpoint:
            yield partial(make_bucket, endpoint)
