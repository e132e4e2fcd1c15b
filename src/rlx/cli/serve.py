"""`rlx serve MODEL...`: models over HTTP, in the form of OpenAI's API."""

from __future__ import annotations

import argparse
import functools
import os
from pathlib import Path
from typing import Any

from rlx import hub
from rlx.cli import console
from rlx.cli.console import UsageError
from rlx.cli.loading import load
from rlx.errors import CapabilityError, RequestError
from rlx.runtime.kv_spec import CACHE_HELP, CACHES

KEY_VARIABLE = "RLX_API_KEY"


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("serve", help="serve models over HTTP, for clients of OpenAI's API")
    command.add_argument(
        "models", nargs="*", metavar="MODEL", help="catalogue names, files, folders or org/name[:quant]"
    )
    command.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1: this machine only)")
    command.add_argument("--port", type=int, default=8000, metavar="N", help="port (8000); 0 takes a free one")
    command.add_argument("--alias", action="append", default=[], metavar="NAME[=MODEL]", help="another name of a model")
    command.add_argument(
        "--key-file",
        type=Path,
        metavar="FILE",
        help=f"API keys, one per line, readable by you only; or ${KEY_VARIABLE}",
    )
    command.add_argument("--open", action="store_true", help="allow a public address without keys")
    command.add_argument("--host-name", action="append", default=[], metavar="NAME", help="name in Host headers")
    command.add_argument("--cors", action="append", default=[], metavar="ORIGIN", help="web pages that may call")
    command.add_argument("--rows", type=int, metavar="N", help="sequences that are generated at the same time")
    command.add_argument(
        "--cache-ram",
        type=int,
        metavar="MIB",
        help="memory for KV caches and shared prefixes (a quarter of what is free, at most 8192)",
    )
    command.add_argument("--max-queued", type=int, default=512, metavar="N", help="requests that may wait (512)")
    command.add_argument("--max-queued-tokens", type=int, metavar="N", help="prompt tokens that may wait")
    command.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds per request (600)")
    command.add_argument("--grace", type=float, default=30.0, metavar="S", help="seconds to finish when stopped (30)")
    command.add_argument("--max-choices", type=int, default=8, metavar="N", help="most choices per request, n (8)")
    command.add_argument("--temperature", type=float, default=1.0, metavar="T", help="if a request says none (1)")
    command.add_argument("--threads", type=int, metavar="N", help="number of threads (default: all usable cores)")
    command.add_argument("--context", type=int, metavar="N", help="maximum tokens, prompt and answer together")
    command.add_argument("--cache", choices=CACHES, default="auto", help=CACHE_HELP)
    command.add_argument("--strict", action="store_true", help="refuse fields that mean nothing here")
    command.add_argument("--matryoshka", action="store_true", help="the encoder may give fewer dimensions")
    command.add_argument("--log-requests", action="store_true", help="a JSON line per request on stderr, without texts")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    try:
        from rlx.server.serve import serve
    except ImportError as error:
        raise CapabilityError(
            f"serve: {error.name} is not installed", hint="install the extra serve: pip install '.[serve]' in the clone"
        ) from error
    settings = _settings(arguments)
    names = [str(name) for name in arguments.models or [hub.DEFAULT]]
    loaders = {_served_name(name): functools.partial(_load, name, arguments) for name in names}
    if len(loaders) < len(names):
        raise UsageError("serve: two models have the same name")
    for name in names:
        hub.resolve(name)  # downloads it, and shows its own progress

    def started(address: str) -> None:
        console.note(f"serving {', '.join(loaders)} at {address}")
        console.note(f"  clients of OpenAI's API: base_url {address}/v1; a page to try it: {address}/")

    cache_bytes = None if arguments.cache_ram is None else arguments.cache_ram << 20
    serve(
        loaders, settings, started, rows=arguments.rows, cache_bytes=cache_bytes, max_queued=arguments.max_queued,
        max_queued_tokens=arguments.max_queued_tokens,
    )  # fmt: skip
    return 0


def _served_name(model: str) -> str:
    """The name that requests use: of a file or a folder, its last part."""
    return Path(model).stem if Path(model).suffix == ".gguf" else Path(model).name if Path(model).exists() else model


def _load(name: str, arguments: argparse.Namespace) -> Any:
    options = {"threads": arguments.threads, "context": arguments.context, "cache": arguments.cache}
    return load(name, **{option: value for option, value in options.items() if value not in (None, "auto")})


def _settings(arguments: argparse.Namespace) -> Any:
    from rlx.server.settings import Keys, ServerSettings

    for option, low in (("port", 0), ("rows", 1), ("cache_ram", 1), ("max_queued", 1), ("max_queued_tokens", 1),
                        ("timeout", 0.001), ("grace", 0), ("max_choices", 1), ("threads", 1), ("context",
                        1)):  # fmt: skip
        value = getattr(arguments, option)
        if value is not None and not low <= value < 2**53:
            raise UsageError(f"serve: --{option.replace('_', '-')} is {value}, expected a number from {low}")
    keys = [] if arguments.key_file is None else Keys.read(arguments.key_file)
    if arguments.key_file is not None and not keys:
        raise UsageError(f"serve: {arguments.key_file} has no keys")
    if os.environ.get(KEY_VARIABLE):
        keys.append(os.environ[KEY_VARIABLE])
    names = [_served_name(str(name)) for name in arguments.models or [hub.DEFAULT]]
    aliases = {}
    for alias in arguments.alias:
        name, equals, model = alias.partition("=")
        if not name or (not equals and len(names) > 1):
            raise UsageError(f"serve: --alias {alias}: of which model?", hint="--alias NAME=MODEL")
        aliases[name] = model if equals else names[0]
    try:
        return ServerSettings(
            host=arguments.host, port=arguments.port, keys=Keys(keys), open=arguments.open,
            host_names=frozenset(name.lower() for name in arguments.host_name), origins=frozenset(arguments.cors),
            aliases=aliases, timeout=arguments.timeout, grace=arguments.grace, max_choices=arguments.max_choices,
            temperature=arguments.temperature, strict=arguments.strict, log_requests=arguments.log_requests,
            matryoshka=arguments.matryoshka,
        )  # fmt: skip
    except RequestError as error:
        raise UsageError(str(error), hint=error.hint) from error
