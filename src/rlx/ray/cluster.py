"""Clusters: connecting to one, and what an actor may use of its node."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import sys
from pathlib import Path
from typing import Any

from rlx.batch.on_ray import import_ray
from rlx.errors import RequestError

CONNECT_S, ANSWER_S = 3.0, 6.0  # for a connection to the head of a cluster, and for its answer
HINT = '"local" (rlx batch --ray local) starts one; ray start --head --port 6379, or its address HOST:6379'
CHECK = "/ray.rpc.NodeInfoGcsService/CheckAlive"


def connect(address: str = "local", **options: Any) -> Any:
    """Connect to a Ray cluster: an address, "auto" (the one of this machine), or "local": a new one.

    Whoever reaches a cluster can run code on it. A new one therefore asks for a token, and has no dashboard; an
    existing one decides for itself (`RAY_AUTH_MODE=token`). Returns the module `ray`; the options are those of
    `ray.init`.
    """
    if address == "local":
        was_imported = "ray" in sys.modules
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        options = {"include_dashboard": False} | options
    ray = import_ray()
    if address == "local" and was_imported:
        _read_mode_again()
    check_address(address)
    try:
        ray.init(address=address, **{"log_to_driver": False} | options)
    except ConnectionError as error:  # what Ray says is a page on its own settings
        where = "this machine" if address == "auto" else address
        raise RequestError(f"connect: no Ray cluster answers at {where}", hint=HINT) from error
    return ray


def _auto_address() -> str | None:
    """The address that Ray takes for "auto": that of RAY_ADDRESS, or of the last cluster of this machine, if any."""
    with contextlib.suppress(ImportError, AttributeError, TypeError, ConnectionError):  # Ray's own, which may change
        address = importlib.import_module("ray._private.services").get_ray_address_from_environment("auto", None)
        return None if address in (None, "auto", "local") else str(address)
    return os.environ.get("RAY_ADDRESS")


def check_address(address: str) -> None:
    """Raise RequestError unless a cluster answers at HOST:PORT or ray://HOST:PORT: Ray itself would try for minutes."""
    if address == "local" and importlib.util.find_spec("ray"):  # it reads RAY_AUTH_MODE when it is imported: not yet
        return
    import_ray()
    place = _auto_address() if address == "auto" else address
    scheme, _, rest = (place or "").rpartition("://")
    if place is None or scheme not in ("", "ray"):  # Ray has others, for services of a vendor
        return
    host, _, port = rest.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and int(port[:6]) < 1 << 16):
        raise RequestError(f"connect: {place!r} is no address of a Ray cluster", hint="HOST:PORT, such as HEAD:6379")
    host = host.strip("[]")  # of IPv6
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except (OSError, UnicodeError) as error:  # UnicodeError: a host that cannot be a name
        reason = getattr(error, "strerror", None) or error
        raise RequestError(f"connect: no Ray cluster answers at {place}: {reason}", hint=HINT) from error
    if os.environ.get("RAY_USE_TLS", "0") == "0":  # else only Ray has the certificates
        _check_answer(place, rest, is_client=scheme == "ray")


def _check_answer(address: str, target: str, *, is_client: bool) -> None:
    """Raise RequestError if what listens at an address is no Ray cluster, or one that refuses the token.

    Addresses ray://HOST:PORT are of another service of Ray, which does not know the question.
    """
    try:
        import grpc
    except ImportError:  # an installation of Ray without the parts that rlx[ray] asks for
        return
    token = _token()
    with grpc.insecure_channel(target, [("grpc.enable_http_proxy", 0)]) as channel:
        try:
            header = [("authorization", f"Bearer {token}")] if token else None
            channel.unary_unary(CHECK)(b"", timeout=ANSWER_S, metadata=header)
            return
        except grpc.RpcError as error:
            code = error.code().name
    if code in ("UNAVAILABLE", "DEADLINE_EXCEEDED") or (code == "UNIMPLEMENTED" and not is_client):
        raise RequestError(f"connect: what answers at {address} is no Ray cluster", notes=[f"gRPC: {code}"], hint=HINT)
    if code == "UNAUTHENTICATED" and _auth_mode() in ("token", "disabled"):
        raise RequestError(
            f"connect: the Ray cluster at {address} {'refuses the token' if token else 'asks for a token'}",
            hint="RAY_AUTH_MODE=token, and the cluster's token in RAY_AUTH_TOKEN or ~/.ray/auth_token",
        )


def _auth_mode() -> str:
    return os.environ.get("RAY_AUTH_MODE", "disabled").lower()


def _token() -> str | None:
    """The token that Ray sends: of RAY_AUTH_TOKEN, else of a file. None if it sends none."""
    if _auth_mode() != "token":
        return None
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token.strip()
    with contextlib.suppress(OSError, UnicodeError):
        path = os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token"
        return Path(path).read_text().strip() or None
    return None


def _read_mode_again() -> None:
    """Let Ray notice a RAY_AUTH_MODE that was set after it was imported: it reads the variable then only.

    Without this, the processes that it starts would ask for a token which the driver does not send.
    """
    wanted = os.environ["RAY_AUTH_MODE"].lower()
    raylet: Any = importlib.import_module("ray._raylet")

    def agrees() -> bool:
        return bool((raylet.get_authentication_mode() == raylet.AuthenticationMode.TOKEN) == (wanted == "token"))

    try:
        if not agrees():
            raylet.Config.initialize("")
        is_read = agrees()
    except AttributeError:  # these names are Ray's own, and may change
        is_read = False
    if not is_read:
        raise RequestError(
            f"connect: ray was imported before RAY_AUTH_MODE was set to {wanted!r}, and reads it only then",
            hint="set RAY_AUTH_MODE=token in the environment, or call rlx.ray.connect before `import ray`",
        )


def assigned() -> dict[str, Any]:
    """Settings of `rlx.load` for what Ray gave to this actor: its CPUs as threads, and a GPU if it has one.

    Outside of Ray there are none. Without `num_cpus`, an actor has no CPUs, and gets one thread.
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return {}
    context = ray.get_runtime_context()
    if context.get_task_id() is None and context.get_actor_id() is None:  # a driver
        return {}
    resources = context.get_assigned_resources()
    settings: dict[str, Any] = {"threads": max(1, int(resources.get("CPU", 0)))}
    os.environ["RAYON_NUM_THREADS"] = str(settings["threads"])  # of the tokenizers, which would take all cores
    if resources.get("GPU"):
        settings["device"] = "cuda"  # the first of those that Ray lets the process see
    return settings
