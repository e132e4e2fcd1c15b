"""The page at `/`: one file in memory, and a policy that lets it load nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources

from rlx.server.exchange import Exchange
from rlx.server.state import State


@cache
def page_text() -> str:
    return resources.files("rlx.server").joinpath("page.html").read_text(encoding="utf-8")


@cache
def policy() -> str:
    """The content security policy: only the page's own script and style run, and only this server is called."""
    text = page_text()

    def digest(tag: str) -> str:
        inner = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.S)
        assert inner is not None
        return "'sha256-" + base64.b64encode(hashlib.sha256(inner[1].encode()).digest()).decode() + "'"

    return (
        f"default-src 'self'; script-src {digest('script')}; style-src {digest('style')}; img-src 'none'; "
        "object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


async def page(exchange: Exchange, state: State) -> None:
    headers = {
        "content-security-policy": policy(), "referrer-policy": "no-referrer", "cache-control": "no-cache",
        "x-frame-options": "DENY",
    }  # fmt: skip
    await exchange.text(page_text(), "text/html; charset=utf-8", headers=headers)
