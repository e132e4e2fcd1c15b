"""Licence terms that users must accept, at a prompt, by a flag or by the environment; acceptance is stored."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from rlx.errors import NotFoundError
from rlx.hub.catalogue import Entry, Terms
from rlx.hub.progress import say
from rlx.hub.store import disk_errors, home, home_or_none, make_folder, write_text


def is_accepted(terms: Terms) -> bool:
    """Whether this user accepted these terms, with exactly this text."""
    folder = home_or_none()
    try:
        return folder is not None and _note(folder, terms).read_text(encoding="utf-8").startswith(terms.text)
    except (OSError, UnicodeDecodeError):
        return False


def require(entry: Entry, *, accept: bool) -> None:
    """Ensure that the terms of a model are accepted, asking if needed; otherwise raise NotFoundError."""
    terms = entry.terms
    if terms is None or is_accepted(terms):
        return
    say(f"{entry.name}: {terms.title}\n\n{terms.text}")
    if accept or _environment_accepts(terms):
        how = "by --accept-licence" if accept else "by RLX_ACCEPT_LICENCE"
    elif _ask(entry, terms):
        how = "at the prompt"
    else:
        raise NotFoundError(
            f"{entry.name}: the {terms.title} are not accepted, so it is not fetched",
            hint=f"rlx pull {entry.name} --accept-licence, or RLX_ACCEPT_LICENCE={terms.name}",
        )
    folder = make_folder(entry.name, _note(home(), terms).parent)
    with disk_errors(entry.name, folder):
        write_text(_note(home(), terms), f"{terms.text}\naccepted {how} on {time.strftime('%Y-%m-%d')}\n")


def _note(folder: Path, terms: Terms) -> Path:
    return folder / "licences" / f"{terms.name}.txt"


def _environment_accepts(terms: Terms) -> bool:
    setting = os.environ.get("RLX_ACCEPT_LICENCE", "").lower().replace(",", " ").split()
    return bool({"1", "yes", "true", "all", terms.name} & set(setting))


def _ask(entry: Entry, terms: Terms) -> bool:
    try:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            return False
    except (AttributeError, ValueError):  # no stdin, or a closed one
        return False
    print(f"Do you accept the {terms.title}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
