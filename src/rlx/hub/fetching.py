"""HTTP for the hub. Imported only to download, since the network modules are slow to load."""

from __future__ import annotations

import http.client
import ssl
import urllib.error
import urllib.parse
import urllib.request
from typing import IO

# Errors worth a retry.
RETRYABLE = (urllib.error.URLError, http.client.HTTPException, ssl.SSLError, TimeoutError, ConnectionError)
quote = urllib.parse.quote
IncompleteRead = http.client.IncompleteRead


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to other hosts, which large files need, but drops the token and never downgrades https."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        old, new = urllib.parse.urlsplit(req.full_url), urllib.parse.urlsplit(newurl)
        if new.scheme != "https" and new.scheme != old.scheme:
            raise urllib.error.URLError(f"redirected from {old.scheme} to {new.scheme}")
        redirect = super().redirect_request(req, fp, code, msg, headers, newurl)
        if redirect is not None and (old.scheme, old.netloc) != (new.scheme, new.netloc):
            redirect.remove_header("Authorization")
        return redirect


def is_web(url: str) -> bool:
    return urllib.parse.urlsplit(url).scheme in ("https", "http")


def open_url(url: str, token: str, start: int, timeout: float) -> http.client.HTTPResponse:
    """Request a file from byte `start` on."""
    request = urllib.request.Request(url, headers={"User-Agent": "rlx", "Accept-Encoding": "identity"})
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    if start:
        request.add_header("Range", f"bytes={start}-")
    reply = urllib.request.build_opener(_SafeRedirects).open(request, timeout=timeout)
    assert isinstance(reply, http.client.HTTPResponse)
    return reply


def status(error: Exception) -> int | None:
    """The HTTP status of an error; None if the server did not answer."""
    if not isinstance(error, urllib.error.HTTPError):
        return None
    error.close()
    return error.code
