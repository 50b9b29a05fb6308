"""Who can reach a server of this package, and what a browser may do with its pages."""

import hmac
import ipaddress
from collections.abc import Mapping, MutableMapping
from typing import Any

from eigengrain.errors import ArgumentError

USER = "eigengrain"


class SafeHeaders:
    """Middleware that adds security headers to every response."""

    def __init__(self, app: Any, headers: Mapping[bytes, bytes]):
        self.app, self.headers = app, headers

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        async def with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                others = [pair for pair in message["headers"] if pair[0].lower() not in self.headers]
                message["headers"] = [*others, *self.headers.items()]
            await send(message)

        await self.app(scope, receive, with_headers)


def is_loopback(host: str) -> bool:
    """Whether an address can only be reached from this machine.

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


def check_password(host: str, password: str | None) -> None:
    """Require a password for an address that other machines can reach, else raise an ArgumentError."""
    if not is_loopback(host) and not password:
        raise ArgumentError("host", "can be reached from other machines", host, "set {password}, or leave {host} out")


def is_visitor(name: str, password: str, expected: str) -> bool:
    """Whether a name and a password are right; the comparison of bytes in constant time reveals nothing."""
    same_name = hmac.compare_digest(name.encode(), USER.encode())
    return hmac.compare_digest(password.encode(), expected.encode()) and same_name
