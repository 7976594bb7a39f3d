"""The viewer: a dataset as local web pages. Needs the extra `view`.

    browser -> 127.0.0.1 -> Host check -> token -> a page of viewer_pages.py -> templates/*.html

Only this machine can connect, and only with the random token of the URL, which becomes a cookie at the first request.
Other sites of the browser are kept out by the Host check, the cookie's SameSite and a Content-Security-Policy that
allows nothing but the viewer's own style and script. Nothing is written, and nothing comes from the network.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from importlib import resources
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from tokenmill import arguments
from tokenmill.errors import OutputError, RecipeError, TokenmillError
from tokenmill.inspection.viewer_pages import Pages, open_pages

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

HOST = "127.0.0.1"
_MAX_PORT = 65_535
_MAX_FORM_BYTES = 1 << 20
_START_SECONDS = 10.0
_STOP_SECONDS = 5.0
_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",  # with none, a form would send no origin
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
_STATIC = {"viewer.css": "text/css", "viewer.js": "text/javascript", "viewer.svg": "image/svg+xml"}
Endpoint = Callable[["Request"], Awaitable["Response"]]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def view(
    dataset: str | os.PathLike[str],
    *,
    beside: str | os.PathLike[str] | None = None,
    tokenizer: str | None = None,
    port: int = 0,
) -> Viewer:
    """Show a dataset, or a build in progress, as web pages of this machine. `url` is where; `close()` ends it.

    `beside` is a second dataset, whose documents are shown next to those of the first. `tokenizer` is a second
    tokenizer to compare texts with, or the only one, for files that do not say theirs. Port 0 is any free one.
    """
    port = arguments.whole("port", port, most=_MAX_PORT)
    path = arguments.place("dataset", dataset)
    pages = open_pages(path, beside=arguments.place_or_none("beside", beside), tokenizer=tokenizer)
    return Viewer(pages, port)


class Viewer:
    """A running viewer. It runs in a thread until `close()`, the end of its `with` block or of the process."""

    def __init__(self, pages: Pages, port: int) -> None:
        try:
            import uvicorn
        except ImportError:
            raise RecipeError("the viewer is not installed", hint="pip install 'tokenmill[view]'") from None
        self._token = secrets.token_urlsafe(24)
        self._socket = _listen(port)
        self.port: int = self._socket.getsockname()[1]
        app = _Guard(_routes(pages), token=self._token, port=self.port)
        config = uvicorn.Config(
            app, log_level="error", access_log=False, lifespan="off", ws="none", server_header=False
        )
        self._server = uvicorn.Server(config)
        # In a thread of its own, so that signals stay with the program.
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The address with the token. Whoever has it can read the dataset, but only from this machine."""
        return f"http://{HOST}:{self.port}/?token={self._token}"

    def wait(self) -> None:
        """Return when the viewer has ended."""
        while self._thread.is_alive():
            self._thread.join(0.2)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(_STOP_SECONDS)
        self._socket.close()

    def __enter__(self) -> Viewer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Viewer(http://{HOST}:{self.port}/, {'running' if self._thread.is_alive() else 'closed'})"


def _listen(port: int) -> socket.socket:
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise OutputError(
            f"cannot listen on port {port}: {error.strerror}", hint="choose another `port`, or 0 for any free one"
        ) from None
    return listener


class _Guard:
    """Refuses requests that do not come from a page of this viewer, and adds the headers that protect the pages."""

    def __init__(self, app: Starlette, *, token: str, port: int) -> None:
        self._app = app
        self._token = token
        self._cookie = f"tokenmill-{port}"
        self._hosts = (f"{HOST}:{port}", f"localhost:{port}")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.requests import Request
        from starlette.responses import PlainTextResponse, RedirectResponse

        async def send_protected(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message["headers"] = [*message["headers"], *extra]
            await send(message)

        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        answer: Any = self._app
        if request.headers.get("host") not in self._hosts:
            answer = PlainTextResponse("This address does not belong to the viewer.\n", 403)
        elif request.headers.get("origin", f"http://{request.headers['host']}") != f"http://{request.headers['host']}":
            answer = PlainTextResponse("Requests from other sites are refused.\n", 403)
        elif self._is_token(request.query_params.get("token")):
            answer = RedirectResponse(request.url.path, 303)
            answer.set_cookie(self._cookie, self._token, httponly=True, samesite="strict")
        elif not self._is_token(request.cookies.get(self._cookie)):
            answer = PlainTextResponse("Open the URL that tokenmill view printed: it has the token.\n", 403)
        await answer(scope, receive, send_protected)

    def _is_token(self, given: str | None) -> bool:
        return given is not None and hmac.compare_digest(given.encode(), self._token.encode())


def _routes(pages: Pages) -> Starlette:
    from starlette.applications import Starlette
    from starlette.routing import Route

    async def missing(_: Request, __: Exception) -> Response:
        return _refusal(pages, RecipeError("there is no such page", hint="use the links above"))

    shown = {
        "/": pages.overview,
        "/documents": pages.documents,
        "/document": pages.document,
        "/sample": pages.sample,
        "/step": pages.step,
        "/search": pages.search,
        "/beside": pages.beside,
        "/build": pages.build,
    }
    routes = [Route(path, _page(pages, show)) for path, show in shown.items()]
    routes += [
        Route("/text", _page(pages, pages.text), methods=["GET", "POST"]),
        Route("/go", _jump(pages)),
        Route("/static/{name}", _static),
    ]
    return Starlette(routes=routes, exception_handlers={404: missing})


def _page(pages: Pages, show: Callable[[dict[str, str]], str]) -> Endpoint:
    """A page. It is made in a thread, so that others are answered meanwhile."""
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import HTMLResponse, PlainTextResponse

    async def respond(request: Request) -> Response:
        given: dict[str, str] | None = dict(request.query_params)
        if request.method == "POST":
            given = await _read_form(request)
        if given is None:
            return PlainTextResponse("The form is larger than 1 MiB.\n", 413)
        try:
            return HTMLResponse(await run_in_threadpool(show, given))
        except TokenmillError as error:
            return _refusal(pages, error)

    return respond


def _jump(pages: Pages) -> Endpoint:
    """The form of the header: from a kind and a number to its page."""
    from starlette.responses import RedirectResponse

    async def respond(request: Request) -> Response:
        try:
            return RedirectResponse(pages.find(dict(request.query_params)), 303)
        except TokenmillError as error:
            return _refusal(pages, error)

    return respond


async def _static(request: Request) -> Response:
    from starlette.responses import PlainTextResponse

    name = request.path_params["name"]
    if name not in _STATIC:
        return PlainTextResponse("There is no such file.\n", 404)
    content = resources.files("tokenmill.inspection").joinpath("templates", name).read_text(encoding="utf-8")
    return PlainTextResponse(content, media_type=_STATIC[name])


async def _read_form(request: Request) -> dict[str, str] | None:
    """The fields of a form; None if it is too large."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_FORM_BYTES:
            return None
    return dict(parse_qsl(body.decode(errors="replace"), keep_blank_values=True))


def _refusal(pages: Pages, error: TokenmillError) -> Response:
    from starlette.responses import HTMLResponse

    return HTMLResponse(pages.refusal(error), 404)
