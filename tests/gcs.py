"""Google's XML interface, spoken before moto's S3 server, and a bucket in it.

Google's interface is S3's with other headers and numbered objects. What is here turns one into the other:

    x-goog-meta-*, x-goog-copy-source    metadata and copies, as S3 has them
    x-goog-generation                    the number that every put gives to an object
    x-goog-if-generation-match           a put or a deletion of the object with this number only; 0 is none
    Authorization: Bearer                a token, which must be the right one
    404                                  for the deletion of what is not there

So it is our reading of Google's manual that the tests run against, not Google's server: rate limits, sign-in,
the etags of joined objects and whatever the manual does not say, it cannot show.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote

from s3 import Bucket, s3_server
from s3 import make_bucket as make_s3_bucket

TOKEN = "ya29.tokenmill-example-token"
_PROGRAM = """
import sys
sys.path.insert(0, {folder!r})
from gcs import Numbered
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server
app = Numbered(DomainDispatcherApplication(create_backend_app))
server = make_server("127.0.0.1", 0, app, threaded=True)
print(server.socket.getsockname()[1], flush=True)
server.serve_forever()
"""
# moto looks for a name here, and checks nothing.
_SOMEBODY = "AWS4-HMAC-SHA256 Credential=somebody/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
Headers = list[tuple[str, str]]


class GoogleBucket(Bucket):
    """A bucket, and the variables of the environment that lead to it. Seen by S3's client from the other side."""

    @property
    def url(self) -> str:
        return f"gs://{self.name}"

    @property
    def environment(self) -> dict[str, str]:
        return {"GOOGLE_BEARER_TOKEN": TOKEN, **self.through(self.endpoint)}

    def through(self, endpoint: str) -> Mapping[str, str]:
        return {"GOOGLE_BASE_URL": endpoint}


@contextlib.contextmanager
def google_server() -> Iterator[str]:
    """The endpoint of a server that holds its objects in memory."""
    with s3_server(_PROGRAM.format(folder=str(Path(__file__).parent))) as endpoint:
        yield endpoint


def make_google_bucket(endpoint: str, name: str) -> GoogleBucket:
    make_s3_bucket(endpoint, name)
    return GoogleBucket(endpoint, name)


class Numbered:
    """A server of S3 that speaks as Google's does, and numbers its objects."""

    def __init__(self, app: Callable[..., Iterable[bytes]]) -> None:
        self._app = app
        self._one_at_a_time = threading.Lock()
        self._numbers: dict[str, int] = {}
        self._next = itertools.count(1_700_000_000_000_000)

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        said = environ.get("HTTP_AUTHORIZATION", "")
        if not said.startswith("AWS4-"):  # those are the test's own
            if said != f"Bearer {TOKEN}":
                return _refuse(environ, start, "401 Unauthorized", "AuthenticationRequired")
            environ["HTTP_AUTHORIZATION"] = _SOMEBODY
        for name in [name for name in environ if name.startswith(("HTTP_X_GOOG_META_", "HTTP_X_GOOG_COPY_"))]:
            environ[name.replace("GOOG", "AMZ", 1)] = environ.pop(name)
        # Google's client writes more characters as %XX than moto reads in names of buckets.
        environ["RAW_URI"] = f"{quote(environ['PATH_INFO'].encode('latin-1'))}?{environ['QUERY_STRING']}".rstrip("?")
        with self._one_at_a_time:
            return self._answer(environ, start)

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> list[bytes]:
        path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
        asked = parse_qs(environ["QUERY_STRING"], keep_blank_values=True)
        wanted = environ.pop("HTTP_X_GOOG_IF_GENERATION_MATCH", None)
        now = self._numbers.get(path, 0)
        if wanted is not None and int(wanted) != now:
            return _refuse(environ, start, "412 Precondition Failed", "PreconditionFailed")
        if method == "DELETE" and not asked and not now:
            return _refuse(environ, start, "404 Not Found", "NoSuchKey")
        answer: list[Any] = []
        body = b"".join(self._app(environ, lambda status, headers, *_: answer.extend((status, headers))))
        status, headers = answer
        # Parts are no objects yet: only the request that joins them makes one.
        is_put = method == "PUT" and not asked
        is_joined = method == "POST" and "uploadId" in asked
        if status.startswith("2") and (is_put or is_joined):
            self._numbers[path] = next(self._next)
        elif status.startswith("2") and method == "DELETE" and not asked:
            del self._numbers[path]
        start(status, self._headers(headers, path))
        return [body]

    def _headers(self, headers: Headers, path: str) -> Headers:
        number = [("x-goog-generation", str(self._numbers[path]))] if path in self._numbers else []
        return [(name.lower().replace("x-amz-meta-", "x-goog-meta-"), value) for name, value in headers] + number


def _refuse(environ: dict[str, Any], start: Callable[..., Any], status: str, code: str) -> list[bytes]:
    environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    start(status, [("Content-Type", "application/xml")])
    return [f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code></Error>".encode()]
