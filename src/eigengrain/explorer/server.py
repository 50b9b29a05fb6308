"""The server of the page: where it listens, who can use it, and what a browser can load."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from eigengrain.errors import ArgumentError
from eigengrain.explorer.access import SafeHeaders, check_password, is_loopback, is_visitor
from eigengrain.explorer.limits import MAX_BYTES, MAX_QUEUE

# before gradio is imported, so that it reports nothing
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"

from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from eigengrain.explorer.page import STYLE, ZOOM, Page, build, theme
from eigengrain.explorer.session import Session

#: environment variable with gradio's folder of uploads
_FOLDER = "GRADIO_TEMP_DIR"

#: the page loads nothing from other sites, and cannot be embedded in another page
_HEADERS = {
    b"content-security-policy": (
        b"default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
        b"img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self' data: blob:; worker-src 'self' blob:; "
        b"object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
    ),
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
}


#: features of gradio that are switched off, whatever its environment variables are
_OFF = ("share", "inline", "inbrowser", "show_error", "run_history", "enable_monitoring", "ssr_mode", "pwa", "mcp_server")


@contextmanager
def _without_proxy(*hosts: str) -> Iterator[None]:
    """Bypass a proxy of the environment: gradio requests its own page after it has started."""
    before = {name: os.environ.get(name) for name in ("no_proxy", "NO_PROXY")}
    os.environ["no_proxy"] = ",".join([*filter(None, before.values()), *hosts])
    try:
        yield
    finally:
        del os.environ["no_proxy"]
        os.environ.update({name: value for name, value in before.items() if value is not None})


class Server:
    """A context manager that serves the page.

    Args:
        sessions: models by name.
        host, port: where to listen; without a port, at a free one from 7860 on.
        password: password of the user ``eigengrain``; required if other machines can reach the address.

    Raises:
        ArgumentError: if the password is missing, or the server cannot listen at the address.
    """

    def __init__(
        self, sessions: Mapping[str, Session], host: str = "127.0.0.1", port: int | None = None, password: str | None = None
    ):
        check_password(host, password)
        self.host, self.port, self.password = host, port, password
        self._folder = Path(tempfile.mkdtemp(prefix="eigengrain-explore-"))
        self._folder_before = os.environ.get(_FOLDER)
        os.environ[_FOLDER] = str(self._folder)
        self.page = Page(sessions, self._folder)
        self.blocks = build(self.page)
        self.blocks.queue(max_size=MAX_QUEUE, api_open=False)

    def __enter__(self) -> "Server":
        try:
            with _without_proxy("localhost", "127.0.0.1", self.host):
                self._launch()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise ArgumentError("port", f"cannot be used at {self.host} ({error})", self.port) from error
            raise
        return self

    def _launch(self) -> None:
        name = f"[{self.host}]" if ":" in self.host else self.host  # IPv6 in an address
        middleware = [Middleware(SafeHeaders, headers=_HEADERS)]
        if is_loopback(self.host):
            # against DNS rebinding: another site could point its own name to this machine and read the responses
            hosts = ["localhost", "127.0.0.1", name, "["]  # older versions of starlette cut an IPv6 host at the bracket
            middleware.append(Middleware(TrustedHostMiddleware, allowed_hosts=hosts))
        _, self.url, _ = self.blocks.launch(
            server_name=name,
            server_port=self.port,
            auth=self._authenticate if self.password else None,
            prevent_thread_lock=True,
            quiet=True,
            footer_links=[],
            allowed_paths=[],
            max_file_size=MAX_BYTES,
            **dict.fromkeys(_OFF, False),
            app_kwargs={"middleware": middleware, "docs_url": None, "redoc_url": None, "openapi_url": None},
            theme=theme(),
            css=STYLE,
            js=ZOOM,
        )

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop running perturbations and the server, and delete uploaded files."""
        self.page.stop_all()
        self.blocks.close(verbose=False)
        shutil.rmtree(self._folder, ignore_errors=True)
        if os.environ.get(_FOLDER) == str(self._folder):
            del os.environ[_FOLDER]
            if self._folder_before is not None:
                os.environ[_FOLDER] = self._folder_before

    def _authenticate(self, name: str, password: str) -> bool:
        return is_visitor(name, password, self.password or "")
