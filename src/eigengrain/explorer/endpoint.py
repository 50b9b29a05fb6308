"""A small HTTP endpoint: a visitor posts an image, and gets JSON back. What the answer is, a function decides."""

import asyncio
import base64
import json
import logging
import re
import shutil
import socket
import tempfile
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from uvicorn.protocols.http.h11_impl import H11Protocol

import eigengrain
from eigengrain.errors import ArgumentError, ImageError
from eigengrain.explorer import limits
from eigengrain.explorer.access import USER, SafeHeaders, check_password, is_loopback, is_visitor
from eigengrain.pages import render

_log = logging.getLogger(__name__)

#: seconds in which the headers and the body of a request must arrive
HEADER_SECONDS, BODY_SECONDS = 10.0, 60.0
#: connections at once; more are closed
MAX_CONNECTIONS = 2 * limits.MAX_QUEUE

#: the page has no script, loads nothing and cannot be embedded; its form needs its origin in the request
_HEADERS = {
    b"content-security-policy": (
        b"default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"same-origin",
    b"cache-control": b"no-store",
}


class Endpoint:
    """A context manager that serves a classifier.

    ``POST /predict`` takes an image, as the body or as the file ``file`` of a form; ``GET /classes`` and ``GET /health``
    are for programs, and ``GET /`` is a page. Errors are ``{"error": …}`` with a status of 400 or more. One thread
    computes the answers one after another.

    Args:
        answer: function from the path of an image to the answer, which JSON must be able to store; it raises an
            ImageError for a file that is not an image.
        classes: names of the classes.
        host, port: where to listen; port 0 is any free one.
        password: password of the user ``eigengrain``; required if other machines can reach the address.
        title: heading of the page.

    Raises:
        ArgumentError: if the password is missing, or the server cannot listen at the address.
    """

    def __init__(
        self,
        answer: Callable[[Path], Any],
        classes: Sequence[str],
        host: str = "127.0.0.1",
        port: int = 8000,
        password: str | None = None,
        title: str = "eigengrain",
    ):
        check_password(host, password)
        self.answer, self.classes, self.password, self.title = answer, list(classes), password, title
        self.host, self.port = host, port
        #: bytes of each image that arrives or waits for the model
        self._received: dict[Request, int] = {}

    def __enter__(self) -> "Endpoint":
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((self.host, self.port))
        except OSError as error:
            self._socket.close()
            problem = f"cannot be used at {self.host} ({error.strerror or error})"
            raise ArgumentError("port", problem, self.port, "choose another one") from error
        self.port = self._socket.getsockname()[1]
        self.url = f"http://{self._name}:{self.port}"
        self._folder = Path(tempfile.mkdtemp(prefix="eigengrain-serve-"))
        self._worker = ThreadPoolExecutor(1, "eigengrain-model")
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._app(),
                http=_Connection,
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                log_level="critical",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=1,
            )
        )
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            self._thread.join(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
        self._worker.shutdown(cancel_futures=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _name(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host  # IPv6 in an address

    def _app(self) -> FastAPI:
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
        app.add_middleware(SafeHeaders, headers=_HEADERS)  # type: ignore[arg-type]
        app.add_exception_handler(HTTPException, _refuse)
        app.add_exception_handler(Exception, _apologise)
        checked = [Depends(self._check_visitor)]

        @app.get("/", dependencies=checked)
        async def page(request: Request) -> HTMLResponse:
            address = request.headers.get("host", "")
            return HTMLResponse(
                render(
                    "serve.html",
                    title=self.title,
                    environment={"eigengrain": eigengrain.__version__},
                    url=f"http://{address}" if re.fullmatch(r"[\w.:\[\]-]+", address) else self.url,
                    user=USER if self.password else "",
                    classes=self.classes,
                    megabytes=limits.MAX_BYTES // 2**20,
                )
            )

        @app.get("/health")
        async def health() -> JSONResponse:
            return JSONResponse({"status": "ok"})

        @app.get("/classes", dependencies=checked)
        async def classes() -> JSONResponse:
            return JSONResponse({"classes": self.classes})

        @app.post("/predict", dependencies=checked)
        async def predict(request: Request) -> JSONResponse:
            return JSONResponse(await self._predict(request))

        return app

    async def _check_visitor(self, request: Request) -> None:
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        names = ("localhost", "127.0.0.1", "[::1]", self._name)
        if is_loopback(self.host) and re.sub(r":\d*$", "", host) not in names:
            # against DNS rebinding: another site could point its own name to this machine and read the responses
            raise HTTPException(400, "the Host header is not that of this server")
        if origin is not None and origin.partition("://")[2] != host:
            raise HTTPException(403, "requests from pages of other sites are not allowed")
        if self.password and not is_visitor(*_login(request.headers.get("authorization", "")), self.password):
            challenge = 'Basic realm="eigengrain", charset="UTF-8"'
            raise HTTPException(401, "name or password is wrong", {"www-authenticate": challenge})

    async def _predict(self, request: Request) -> Any:
        if len(self._received) >= limits.MAX_QUEUE:
            raise _busy()
        self._received[request] = 0
        try:
            image = await self._read(request)
            if not image:
                raise HTTPException(400, "there is no image: post it as the body, or as the file 'file' of a form")
            job = asyncio.get_running_loop().run_in_executor(self._worker, self._answer, image)
            return await asyncio.wait_for(job, limits.MAX_WAIT)
        except TimeoutError:
            raise _busy() from None
        except ImageError as error:
            raise HTTPException(415, str(error)) from None
        finally:
            del self._received[request]

    async def _read(self, request: Request) -> bytes:
        """The image of a request, within the limits of its size and time."""
        chunks = self._chunks(request)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
                    return b"".join([chunk async for chunk in chunks])
                parser = MultiPartParser(request.headers, chunks, max_files=1, max_fields=10)
                parser.spool_max_size = limits.MAX_BYTES  # in memory
                file = (await parser.parse()).get("file")
                return await file.read() if isinstance(file, UploadFile) else b""
        except TimeoutError:
            raise HTTPException(408, f"the image must arrive within {BODY_SECONDS:.0f} seconds") from None
        except ClientDisconnect:
            raise HTTPException(400, "the connection was closed") from None
        except (MultiPartException, ValueError) as error:
            raise HTTPException(400, f"the form cannot be read ({error})") from None

    async def _chunks(self, request: Request) -> AsyncGenerator[bytes, None]:
        length = request.headers.get("content-length", "0")
        if len(length) > 15 or int(length) > limits.MAX_BYTES:
            raise _too_large()
        async for chunk in request.stream():
            self._received[request] += len(chunk)
            if self._received[request] > limits.MAX_BYTES:
                raise _too_large()
            if sum(self._received.values()) > limits.CACHE_BYTES:
                raise _busy()
            yield chunk

    def _answer(self, image: bytes) -> Any:
        """Compute an answer, in the worker; decoders need a file."""
        path = self._folder / "upload"
        try:
            path.write_bytes(image)
            return self.answer(path)
        finally:
            path.unlink(missing_ok=True)


class _Connection(H11Protocol):
    """A connection that is closed if the headers of a request do not arrive in time; errors are JSON."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._deadline = self.loop.call_later(HEADER_SECONDS, self._close_if_idle)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._deadline.cancel()
        self._deadline = self.loop.call_later(HEADER_SECONDS, self._close_if_idle)
        super().on_response_complete()

    def _close_if_idle(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        body = json.dumps({"error": msg}).encode()
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()


def _login(header: str) -> tuple[str, str]:
    """Name and password of an ``Authorization`` header, which FastAPI reads as ASCII only; empty if it is not valid.

    Browsers and curl send UTF-8, some libraries Latin-1.

    Example:
        >>> [_login("Basic " + base64.b64encode("wren:fjäder".encode(code)).decode()) for code in ("utf-8", "latin-1")]
        [('wren', 'fjäder'), ('wren', 'fjäder')]
    """
    scheme, _, text = header.partition(" ")
    try:
        login = base64.b64decode(text if scheme.lower() == "basic" else "", validate=True)
    except ValueError:
        return "", ""
    try:
        name, _, password = login.decode().partition(":")
    except UnicodeDecodeError:
        name, _, password = login.decode("latin-1").partition(":")
    return name, password


async def _refuse(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    # what is left of the body is not read
    headers = {**(error.headers or {}), "connection": "close"}
    return JSONResponse({"error": error.detail}, error.status_code, headers)


async def _apologise(_: Request, error: Exception) -> JSONResponse:
    _log.error("a request failed", exc_info=error)
    return JSONResponse({"error": "the server failed to answer"}, 500, {"connection": "close"})


def _busy() -> HTTPException:
    return HTTPException(503, "the model is busy with other visitors: try again in a moment", {"retry-after": "1"})


def _too_large() -> HTTPException:
    return HTTPException(413, f"the image must have at most {limits.MAX_BYTES // 2**20} MB: scale it down")
