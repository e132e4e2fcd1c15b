"""Hugging Face models, `org/name[:quant]`: from a local cache or over https.

Caches follow huggingface.co/docs/hub/local-cache: `models--org--name/refs/<revision>` names a commit and
`snapshots/<commit>/` holds its files. Ours, `hub/` in the model folder, stores plain files and adds
`listings/<commit>`, the names of all files of a commit: other programs download only what they need, so only a listing
tells whether a file is missing locally or does not exist. Sizes and hashes come from the hub's API: sha256 for large
files, git's blob hash for small ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from rlx.errors import FormatError, NotFoundError
from rlx.fast_dataclass import dataclass
from rlx.formats.strict_json import parse_json
from rlx.formats.tensor_file import PART_NAME
from rlx.hub import store
from rlx.hub.catalogue import is_safe_name
from rlx.hub.progress import Tick, bar, offset_tick, say

if TYPE_CHECKING:
    import http.client

PREFIX = "hf:"
MAIN = "main"
_NAME = re.compile(r"(?P<org>[\w][\w.-]*)/(?P<name>[\w][\w.-]*)(?::(?P<quant>[\w][\w.-]*))?", re.ASCII)
_REVISION = re.compile(r"[\w][\w.-]*(?:/[\w][\w.-]*)*", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_QUANT = re.compile(r"(?:^|[-._/])((?:UD-)?(?:I?Q\d\w*|TQ\d_\d|MXFP4\w*|BF16|F16|F32))(?=[-.]|$)", re.I | re.ASCII)
# Files next to safetensors weights that are part of the model.
_SIDECAR = re.compile(r"[\w.-]+\.(json|jinja|txt)|tokenizer\.model|\d+_\w+/(config\.json|model\.safetensors)", re.ASCII)
MODEL_ENDINGS = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".onnx", ".json")

_TIMEOUT_S = 30
_TRIES = 4
_MAX_ANSWER = 32 << 20


@dataclass(frozen=True, slots=True)
class Repo:
    """A parsed model name."""

    org: str
    name: str
    quant: str | None = None
    revision: str = MAIN

    def __str__(self) -> str:
        return f"{self.org}/{self.name}" + (f":{self.quant}" if self.quant else "")

    @property
    def folder(self) -> str:
        """Its folder name in a cache."""
        return f"models--{self.org}--{self.name}"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Local files of one commit; the first holds the weights."""

    folder: Path
    commit: str
    names: tuple[str, ...]
    in_doubt: tuple[str, ...] = ()  # missing files that may or may not exist in the repository


def parse(text: str, revision: str | None = None) -> Repo | None:
    """Parse a model name; None for anything else. The prefix `hf:` makes it unambiguous."""
    explicit = text.startswith(PREFIX)
    match = _NAME.fullmatch(text.removeprefix(PREFIX))
    if match is None or ".." in text or "--" in text or len(text) > 200:
        return None
    if not explicit and text.lower().endswith(MODEL_ENDINGS):  # a path that does not exist
        return None
    if revision is not None and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise NotFoundError(f"{text}: {revision!r} is not a valid revision")
    return Repo(match["org"], match["name"], match["quant"], revision or MAIN)


# -- which files -----------------------------------------------------------------------------------------------------
def choose(repo: Repo, names: Iterable[str]) -> tuple[str, ...]:
    """Select the files of a model from a repository, the one with the weights first."""
    known = sorted(n for n in names if is_safe_name(n))
    candidates = _candidates(repo, known)
    if len(candidates) == 1:
        return candidates[0]
    ggufs = [files[0] for files in _gguf_models(known)]
    labels = list(dict.fromkeys(_label(n) for n in ggufs))
    if not candidates and not repo.quant:
        raise NotFoundError(f"{repo}: no complete weights as safetensors or GGUF in it", hint="pickles are not read")
    if not candidates:
        available = ", ".join(labels) or "no GGUF files"
        raise NotFoundError(f"{repo}: no GGUF file of {repo.quant!r}", notes=[f"available: {available}"])
    if repo.quant or len(labels) < len(ggufs):  # labels are ambiguous
        labels = [PurePosixPath(files[0]).name for files in candidates]
    raise NotFoundError(
        f"{repo}: {len(candidates)} GGUF models, name one",
        notes=[f"available: {', '.join(labels)}"],
        hint=f"{repo.org}/{repo.name}:{labels[0]}",
    )


def _candidates(repo: Repo, known: Sequence[str]) -> list[tuple[str, ...]]:
    """The models that a name can refer to, each with all its files."""
    ggufs = _gguf_models(known)
    if repo.quant:
        return [files for files in ggufs if _has_quant(files[0], repo.quant)]
    weights = _safetensors(known)
    if not weights:
        return ggufs
    return [(*weights, *(n for n in known if _SIDECAR.fullmatch(n) and n not in weights))]


def _gguf_models(known: Sequence[str]) -> list[tuple[str, ...]]:
    """Each complete GGUF model, single-file or split; image projectors (mmproj) are skipped."""
    models = []
    for name in known:
        part = PART_NAME.fullmatch(name)
        if not name.endswith(".gguf") or "mmproj" in name.lower() or (part and int(part["number"]) != 1):
            continue
        count = int(part["count"]) if part else 1
        files = tuple(f"{part['stem']}-{i:05}-of-{count:05}.gguf" for i in range(1, count + 1)) if part else (name,)
        if set(files) <= set(known):
            models.append(files)
    return models


def _safetensors(known: Sequence[str]) -> tuple[str, ...]:
    """The safetensors files with all shards; empty if any is missing or there is no config.json."""
    if "config.json" not in known:
        return ()
    if "model.safetensors" in known:
        return ("model.safetensors",)
    index = "model.safetensors.index.json"
    shards = [n for n in known if n.startswith("model-") and n.endswith(".safetensors")]
    first = PART_NAME.fullmatch(shards[0]) if shards else None
    complete = first is not None and len(shards) == int(first["count"])
    return (index, *shards) if index in known and complete else ()


def _has_quant(name: str, quant: str) -> bool:
    """Whether a file matches a quantisation or file name: `x-Q4_K_M.gguf` matches `q4_k_m`, not `Q4_K`."""
    if quant.lower() == PurePosixPath(name).name.lower():
        return True
    part = PART_NAME.fullmatch(name)
    stem = part["stem"] if part else name.removesuffix(".gguf")
    return re.search(rf"(?:^|[-./]){re.escape(quant)}(?:[-./]|$)", stem, re.I) is not None


def _label(name: str) -> str:
    """The quantisation in a file name, else the name."""
    own = PurePosixPath(name).name
    labels = _QUANT.findall(own)
    return str(labels[-1]) if labels else own


# -- on this machine -------------------------------------------------------------------------------------------------
def cache_folders() -> list[Path]:
    """Our own cache, then that of Hugging Face's libraries."""
    folders = []
    home = store.home_or_none()
    if home is not None:
        folders.append(home / "hub")
    setting = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if not setting:
        own = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
        setting = os.path.join(own, "hub")
    folders.append(Path(os.path.expanduser(setting)))
    return [folder for folder in folders if folder.is_absolute()]


def locate(repo: Repo) -> Snapshot | None:
    """Find a complete model in the caches, or None; NotFoundError if the name is ambiguous there.

    Prefers a snapshot without files in doubt.
    """
    complete = [snapshot for snapshot, absent in _scan_caches(repo) if not absent]
    return min(complete, key=lambda snapshot: bool(snapshot.in_doubt), default=None)


def incomplete(repo: Repo) -> list[str]:
    """Describe incomplete copies of a model in the caches, one line per copy."""
    return [
        f"{snapshot.folder} has only a part of it: {absent} is missing"
        for snapshot, absent in _scan_caches(repo)
        if absent
    ]


def _scan_caches(repo: Repo) -> Iterator[tuple[Snapshot, str | None]]:
    """Yield the snapshots that hold the weights of a model, each with a file that it certainly lacks, if any."""
    for root in cache_folders():
        for folder in _snapshots(root / repo.folder, repo.revision):
            names = _names(folder)
            if not _candidates(repo, names):
                continue
            absent, in_doubt = _gaps(repo, folder, names)
            yield Snapshot(folder, folder.name, choose(repo, names), in_doubt), absent


def _gaps(repo: Repo, folder: Path, names: Sequence[str]) -> tuple[str | None, tuple[str, ...]]:
    """A file that a snapshot lacks, and files that it may lack."""
    if repo.quant or not _safetensors(names):
        return None, ()  # a GGUF file is self-contained
    listing = _listing(repo, folder.name)
    if listing is not None:
        wanted = next(iter(_candidates(repo, listing)), ())
        return next((n for n in wanted if n not in names), None), ()
    if "tokenizer.json" not in names:
        return "tokenizer.json", ()
    wanted = ("tokenizer_config.json", *(("modules.json",) if _may_embed(folder / "config.json") else ()))
    return None, tuple(n for n in wanted if n not in names)


def _may_embed(config: Path) -> bool:
    """Whether it may be a sentence-transformers model; causal language models say so in their config."""
    try:
        settings = parse_json(config.read_bytes(), config, infinity=True)
    except (OSError, FormatError):
        return False  # opening the model reports the error
    kinds = settings.get("architectures") if isinstance(settings, dict) else None
    return not any("CausalLM" in str(k) or "LMHead" in str(k) for k in kinds or ())


def _listing(repo: Repo, commit: str) -> list[str] | None:
    """The names of all files of a commit, if a listing was stored."""
    home = store.home_or_none()
    if home is None:
        return None
    try:
        return (home / "hub" / repo.folder / "listings" / commit).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None


def models_in(folder: Path, org: str, name: str) -> list[tuple[Repo, Snapshot]]:
    """Every complete model in a snapshot folder, with its name."""
    names, repo = _names(folder), Repo(org, name)
    models = [(Repo(org, name, _label(files[0])), files) for files in _gguf_models(names)]
    if _safetensors(names) and _gaps(repo, folder, names)[0] is None:
        models = [(repo, files) for files in _candidates(repo, names)] + models
    return [(repo, Snapshot(folder, folder.name, files)) for repo, files in models]


def _names(folder: Path) -> list[str]:
    paths = (p.relative_to(folder).as_posix() for p in folder.rglob("*") if store.file_size(p) is not None)
    return sorted(n for n in paths if is_safe_name(n))


def _snapshots(folder: Path, revision: str) -> list[Path]:
    """Snapshot folders of a revision: that of the commit its ref names, or of the revision itself."""
    try:
        commit = (folder / "refs" / revision).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        commit = revision
    if is_safe_name(commit) and (folder / "snapshots" / commit).is_dir():
        return [folder / "snapshots" / commit]
    if revision != MAIN:
        return []
    with contextlib.suppress(OSError):  # no ref, as in a copied folder: newest first
        folders = [p for p in (folder / "snapshots").iterdir() if p.is_dir() and is_safe_name(p.name)]
        return sorted(folders, key=lambda p: p.stat().st_mtime, reverse=True)
    return []


# -- over the network ------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Remote:
    """A file as described by the hub's API."""

    name: str
    size: int | None
    sha256: str | None
    git_sha1: str | None


def endpoint() -> str:
    """The base URL of the hub."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def fetch(repo: Repo, *, quiet: bool = False) -> Snapshot:
    """Download and verify the files of a model into our cache; resumes partial downloads."""
    commit, remotes = _query_files(repo)
    names = choose(repo, remotes)
    root = store.make_folder(str(repo), store.home() / "hub" / repo.folder)
    folder, partial = root / "snapshots" / commit, root / store.PARTIAL

    def waiting() -> None:
        say(f"{repo}: another rlx process is fetching it; waiting", quiet=quiet)

    with store.lock(repo.folder, waiting):
        with store.disk_errors(str(repo), root):
            (root / "listings").mkdir(exist_ok=True)
            store.write_text(root / "listings" / commit, "\n".join(sorted(filter(is_safe_name, remotes))))
        absent = [remotes[n] for n in names if not _is_present(folder, remotes[n])]
        missing = [r for r in absent if not _link_from_cache(repo, commit, r, folder / r.name)]
        total = sum(r.size or 0 for r in missing)
        store.check_free(str(repo), root, total, max((r.size or 0 for r in missing), default=0))
        with store.disk_errors(str(repo), root):
            partial.mkdir(exist_ok=True)
            if missing:
                _download_all(repo, commit, missing, folder, partial, total, quiet)
            for temporary in partial.iterdir():
                if not temporary.name.startswith(commit):
                    temporary.unlink()
            with contextlib.suppress(OSError):  # not empty: a partial file of this commit stays
                partial.rmdir()
            if repo.revision != commit:
                ref = root / "refs" / repo.revision
                ref.parent.mkdir(parents=True, exist_ok=True)
                store.write_text(ref, commit)
    return Snapshot(folder, commit, names)


def _download_all(
    repo: Repo, commit: str, missing: Sequence[Remote], folder: Path, partial: Path, total: int, quiet: bool
) -> None:
    with bar(str(repo), total, quiet=quiet) as tick:
        done = 0
        for remote in missing:
            temporary = partial / f"{commit}-{remote.name.replace('/', '--')}"
            _download(repo, commit, remote, temporary, offset_tick(tick, done))
            _check(repo, remote, temporary)
            target = folder / remote.name
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(temporary, target)
            done += remote.size or 0


def _is_present(folder: Path, remote: Remote) -> bool:
    size = store.file_size(folder / remote.name)
    return size is not None and remote.size in (None, size)


def _link_from_cache(repo: Repo, commit: str, remote: Remote, target: Path) -> bool:
    """Hard-link a file from another cache if possible, so it is neither downloaded nor stored twice."""
    for root in cache_folders():
        path = root / repo.folder / "snapshots" / commit / remote.name
        with contextlib.suppress(OSError):  # on another disk, or owned by another user
            if remote.size is not None and store.file_size(path) == remote.size and _mismatch(remote, path) is None:
                target.parent.mkdir(parents=True, exist_ok=True)
                os.link(path.resolve(), target)
                return True
    return False


def _query_files(repo: Repo) -> tuple[str, dict[str, Remote]]:
    """Query the commit of a revision and its files."""
    from rlx.hub.fetching import RETRYABLE, quote

    revision = quote(repo.revision, safe="")
    url = f"{endpoint()}/api/models/{repo.org}/{repo.name}/revision/{revision}?blobs=true"
    for attempt in range(_TRIES):
        try:
            with _open(url) as reply:
                answer = reply.read(_MAX_ANSWER + 1)
            break
        except (OSError, *RETRYABLE) as error:
            _raise_or_wait(repo, error, attempt)
    document = parse_json(answer, Path(str(repo)))
    commit = document.get("sha") if isinstance(document, dict) else None
    siblings = document.get("siblings") if isinstance(document, dict) else None
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit) or not isinstance(siblings, list):
        raise FormatError(f"{repo}: {endpoint()} does not answer as the hub does: no commit or no list of files")
    remotes = [_remote(s) for s in siblings if isinstance(s, dict) and isinstance(s.get("rfilename"), str)]
    return commit, {r.name: r for r in remotes}


def _remote(sibling: dict[str, Any]) -> Remote:
    lfs = sibling.get("lfs")
    large = lfs if isinstance(lfs, dict) else {}
    size = large.get("size", sibling.get("size"))
    sha256, blob = large.get("sha256"), sibling.get("blobId")
    return Remote(
        sibling["rfilename"],
        size if type(size) is int and size >= 0 else None,
        sha256.lower() if isinstance(sha256, str) else None,
        blob.lower() if isinstance(blob, str) and not large else None,  # of a large file, it hashes the LFS pointer
    )


def _download(repo: Repo, commit: str, remote: Remote, temporary: Path, tick: Tick) -> None:
    from rlx.hub.fetching import RETRYABLE, quote

    url = f"{endpoint()}/{repo.org}/{repo.name}/resolve/{commit}/{quote(remote.name)}"
    for attempt in range(_TRIES):
        try:
            _resume_download(url, remote, temporary, tick)
            return
        except RETRYABLE as error:
            _raise_or_wait(repo, error, attempt)


def _resume_download(url: str, remote: Remote, temporary: Path, tick: Tick) -> None:
    """Download the rest of a partial file; commits are immutable, so earlier bytes stay valid."""
    from rlx.hub.fetching import IncompleteRead

    have = store.file_size(temporary) or 0
    if remote.size is None or have > remote.size:
        have = 0
    if have and have == remote.size:
        return
    with _open(url, have) as reply:
        if have and reply.status != 206:  # the server ignores ranges
            have = 0
        with open(temporary, "r+b" if have else "wb") as file:
            file.truncate(have)
            file.seek(have)
            while chunk := reply.read(store.CHUNK):
                have += len(chunk)
                if remote.size is not None and have > remote.size:
                    raise FormatError(f"{remote.name}: the hub sends more than the {remote.size} bytes it announced")
                file.write(chunk)
                tick(have)
            file.flush()
            os.fsync(file.fileno())
    if remote.size is not None and have < remote.size:
        raise IncompleteRead(b"", remote.size - have)


def _check(repo: Repo, remote: Remote, path: Path) -> None:
    wrong = _mismatch(remote, path)
    if wrong is not None:
        path.unlink()
        raise FormatError(f"{repo}: {remote.name}: expected hash {wrong[0]}, found {wrong[1]}; it was dropped")


def _mismatch(remote: Remote, path: Path) -> tuple[str, str] | None:
    """Expected and actual hash of a file; None if they match or none is known."""
    size = path.stat().st_size
    if remote.sha256:
        expected, actual = remote.sha256, store.file_sha256(path)
    elif remote.git_sha1:
        digest = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)  # git's blob hash
        with open(path, "rb") as file:
            while chunk := file.read(store.CHUNK):
                digest.update(chunk)
        expected, actual = remote.git_sha1, digest.hexdigest()
    else:
        return None
    return None if actual == expected else (expected, actual)


def _open(url: str, start: int = 0) -> http.client.HTTPResponse:
    from rlx.hub import fetching

    if not fetching.is_web(url):
        raise NotFoundError(f"HF_ENDPOINT is {endpoint()}, which is not an https URL")
    return fetching.open_url(url, os.environ.get("HF_TOKEN", "").strip(), start, _TIMEOUT_S)


def _raise_or_wait(repo: Repo, error: Exception, attempt: int) -> None:
    """Raise a permanent error; for a transient one, wait before the next attempt, longer each time."""
    from rlx.hub.fetching import status

    code = status(error)
    if code == 404:
        raise NotFoundError(f"{repo}: the hub has no such model or revision", notes=[f"asked: {endpoint()}"]) from error
    if code in (401, 403):
        hint = "is the name right? For a private or gated model accept its terms on its page and set HF_TOKEN"
        raise NotFoundError(f"{repo}: the hub refuses it ({code})", hint=hint) from error
    if (code is None or code == 429 or code >= 500) and attempt + 1 < _TRIES:
        time.sleep(_retry_s(attempt))
        return
    why = f"status {code}" if code else getattr(error, "reason", None) or error
    raise NotFoundError(
        f"{repo}: cannot be fetched from {endpoint()}: {why}",
        hint="HF_ENDPOINT names a mirror; a path to a file or folder works without a network",
    ) from error


def _retry_s(attempt: int) -> float:
    return 0.5 * 2.0**attempt
