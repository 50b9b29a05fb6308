"""The server around the page: where it listens, who may come in, and what a browser is allowed to load."""

import hmac
import ipaddress
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eigengrain.explorer.limits import MAX_BYTES, MAX_QUEUE

# before gradio is imported: it must not tell anyone that it was
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"

from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from eigengrain.explorer.page import STYLE, Page, build, theme
from eigengrain.explorer.session import Lens

USER = "eigengrain"

#: where gradio looks for the folder of uploads
_FOLDER = "GRADIO_TEMP_DIR"

#: a page that loads nothing from elsewhere and stands in no other page
_HEADERS = {
    b"content-security-policy": (
        b"default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
        b"img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self' data: blob:; worker-src 'self' blob:; "
        b"object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
    ),
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
}


@contextmanager
def _reached_directly(*hosts: str) -> Iterator[None]:
    """Keep a proxy of the environment out: gradio asks the page that it has just opened whether it is there."""
    before = {name: os.environ.get(name) for name in ("no_proxy", "NO_PROXY")}
    os.environ["no_proxy"] = ",".join([*filter(None, before.values()), *hosts])
    try:
        yield
    finally:
        del os.environ["no_proxy"]
        os.environ.update({name: value for name, value in before.items() if value is not None})


class _SafeHeaders:
    """Adds the headers above to every answer."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        async def with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                given = [pair for pair in message["headers"] if pair[0].lower() not in _HEADERS]
                message["headers"] = [*given, *_HEADERS.items()]
            await send(message)

        await self.app(scope, receive, with_headers)


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine alone.

    Example:
        >>> [is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "0.0.0.0", "example.org")]
        [True, True, True, False, False]
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_reach(host: str, password: str | None) -> None:
    """Refuse an address that others can reach without a password.

    Raises:
        ValueError: for such an address.
    """
    if not is_loopback(host) and not password:
        raise ValueError(f"--host {host} can be reached by others: set a --password for it, or leave --host out")


class Server:
    """The page at an address, until it is closed. Used with ``with``.

    Args:
        lenses: models by name.
        host: address to listen at.
        port: None for a free one from 7860 on.
        password: asked of every visitor, with the name ``eigengrain``; needed where others can reach the address.

    Raises:
        ValueError: for an address that others can reach without a password, or one that cannot be listened at.
    """

    def __init__(
        self, lenses: Mapping[str, Lens], host: str = "127.0.0.1", port: int | None = None, password: str | None = None
    ):
        check_reach(host, password)
        self.host, self.port, self.password = host, port, password
        self._folder = Path(tempfile.mkdtemp(prefix="eigengrain-explore-"))
        self._folder_before = os.environ.get(_FOLDER)
        os.environ[_FOLDER] = str(self._folder)
        self.page = Page(lenses, self._folder)
        self.blocks = build(self.page)
        self.blocks.queue(max_size=MAX_QUEUE, api_open=False)

    def __enter__(self) -> "Server":
        try:
            with _reached_directly("localhost", "127.0.0.1", self.host):
                self._launch()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise ValueError(f"cannot listen at {self.host}, port {self.port or '7860 to 7959'}: {error}") from error
            raise
        return self

    def _launch(self) -> None:
        name = f"[{self.host}]" if ":" in self.host else self.host  # as IPv6 stands in an address
        middleware = [Middleware(_SafeHeaders)]
        if is_loopback(self.host):
            # a page elsewhere could give its own name this machine's address and read the answers
            hosts = ["localhost", "127.0.0.1", name, "["]  # older versions see no more of IPv6 than the bracket
            middleware.append(Middleware(TrustedHostMiddleware, allowed_hosts=hosts))
        _, self.url, _ = self.blocks.launch(
            server_name=name,
            server_port=self.port,
            auth=self._admits if self.password else None,
            prevent_thread_lock=True,
            quiet=True,
            share=False,
            inline=False,
            inbrowser=False,
            show_error=False,
            footer_links=[],
            run_history=False,
            allowed_paths=[],
            max_file_size=MAX_BYTES,
            enable_monitoring=False,
            ssr_mode=False,
            pwa=False,
            mcp_server=False,
            app_kwargs={"middleware": middleware, "docs_url": None, "redoc_url": None, "openapi_url": None},
            theme=theme(),
            css=STYLE,
        )

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop what runs, and delete what was uploaded."""
        self.page.stop_all()
        self.blocks.close(verbose=False)
        shutil.rmtree(self._folder, ignore_errors=True)
        if os.environ.get(_FOLDER) == str(self._folder):
            del os.environ[_FOLDER]
            if self._folder_before is not None:
                os.environ[_FOLDER] = self._folder_before

    def _admits(self, name: str, password: str) -> bool:
        # by bytes and in constant time, so that the time of an answer tells nothing
        known = hmac.compare_digest(name.encode(), USER.encode())
        return hmac.compare_digest(password.encode(), (self.password or "").encode()) and known
