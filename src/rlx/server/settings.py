"""Settings of a server, checked: what is reachable, by whom, and how much of it."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path

from rlx.errors import RequestError
from rlx.fast_dataclass import dataclass

MAX_HEAD = 16 << 10  # bytes of a request's line and headers
MAX_BODY = 8 << 20
MIN_KEY = 8  # characters


class Keys:
    """API keys. Only their digests are kept; comparing takes the same time whichever key matches, or none."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        for key in keys:
            if len(key) < MIN_KEY or not key.isascii() or any(c.isspace() for c in key):
                raise RequestError(f"serve: a key is at least {MIN_KEY} ASCII characters without white space")
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def match(self, key: str) -> str | None:
        """A name for the owner of a key, which says nothing of the key; None if it is not known."""
        digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # all of them, always
        return digest.hex()[:16] if any(matches) else None

    @classmethod
    def read(cls, path: Path) -> list[str]:
        """Keys of a file, one per line; nobody else may read it."""
        try:
            mode = path.stat().st_mode
            lines = path.read_text().splitlines()
        except OSError as error:
            raise RequestError(f"serve: {path}: {error.strerror}") from error
        if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise RequestError(f"serve: {path}: others may read it (mode {mode & 0o777:o})", hint=f"chmod 600 {path}")
        return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


@dataclass(frozen=True)
class ServerSettings:
    """How a server is reached and what it allows."""

    host: str = "127.0.0.1"
    port: int = 8000
    keys: Keys = field(default_factory=Keys)
    open: bool = False  # a public address without keys
    host_names: frozenset[str] = frozenset()  # names in the Host header, besides the address itself
    origins: frozenset[str] = frozenset()  # of pages elsewhere that may call (CORS)
    aliases: Mapping[str, str] = field(default_factory=dict)  # other names of models
    timeout: float = 600.0  # seconds of a request, waiting included
    grace: float = 30.0  # seconds for running requests when the server stops
    max_choices: int = 8  # of `n`
    temperature: float = 1.0  # where a request says none, as OpenAI's API
    strict: bool = False  # refuse fields that mean nothing here
    log_requests: bool = False  # a JSON line per request on stderr
    matryoshka: bool = False  # whether embeddings may be cut to fewer dimensions

    def __post_init__(self) -> None:
        if not self.is_loopback and not self.keys and not self.open:
            raise RequestError(
                f"serve: {self.host} can be reached from other machines, and there is no key",
                hint="--key-file FILE, or --open if everybody may use it",
            )

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def allows_host(self, header: str) -> bool:
        """Whether a Host header names this server: another name may be a page that rebinds its own (DNS rebinding)."""
        name = host_name(header)
        if name is None:
            return False
        if name in {"localhost", self.host.lower(), *self.host_names}:
            return True
        try:
            address = ipaddress.ip_address(name)
            bound = ipaddress.ip_address(self.host)
        except ValueError:
            return False
        return address == bound or bound.is_unspecified or (address.is_loopback and bound.is_loopback)

    def allows_origin(self, origin: str, host: str) -> bool:
        """Whether a page of this origin may call: the server's own page, or one that was named."""
        return origin in self.origins or origin in (f"http://{host}", f"https://{host}")


def host_name(header: str) -> str | None:
    """The name in a Host header without its port, in lower case; None if the header is malformed."""
    if header.startswith("["):
        name, bracket, rest = header[1:].partition("]")
        if not bracket:
            return None
        try:
            ipaddress.IPv6Address(name)
        except ValueError:
            return None
        port = rest.removeprefix(":") if rest.startswith(":") else rest
        valid = rest == "" or (rest.startswith(":") and port.isascii() and port.isdigit())
    else:
        name, colon, port = header.partition(":")
        valid = (not colon or (port.isascii() and port.isdigit())) and bool(name)
        valid = valid and name.isascii() and all(c.isalnum() or c in "-._" for c in name)
    return name.lower() if valid and len(port) <= 5 else None
