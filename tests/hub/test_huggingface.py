"""Hugging Face models: which files a name selects, local caches, and a fake hub on localhost."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from fake_index import content, file_hashes, sha256

from rlx.errors import CapabilityError, FormatError, NotFoundError
from rlx.hub import huggingface, locate, names_a_model, remove, resolve, store, stored
from rlx.hub.huggingface import Repo, choose, parse

COMMIT = "0123456789abcdef0123456789abcdef01234567"
BERT = {
    "config.json": b"{}",
    "model.safetensors": content("bert", 70_000),
    "tokenizer.json": b"{}",
    "vocab.txt": b"a\nb\n",
    "1_Pooling/config.json": b"{}",
    "pytorch_model.bin": b"pickle",
    "onnx/model.onnx": b"onnx",
    "README.md": b"text",
    ".gitattributes": b"x",
}
GGUFS = {
    "Tiny-Q4_K_M.gguf": content("q4", 60_000),
    "Tiny-Q8_0.gguf": content("q8", 90_000),
    "mmproj-Tiny-F16.gguf": b"images",
    "README.md": b"text",
}


# -- names -----------------------------------------------------------------------------------------------------------
def test_a_name_is_taken_apart() -> None:
    assert parse("org/name") == Repo("org", "name")
    assert parse("hf:org/na.me-1:Q4_K_M") == Repo("org", "na.me-1", "Q4_K_M")
    assert parse("org/name", "v1.0") == Repo("org", "name", None, "v1.0")
    assert str(Repo("org", "name", "Q8_0")) == "org/name:Q8_0"
    assert parse("hf:org/x.gguf") == Repo("org", "x.gguf")
    assert names_a_model("org/name:q4_0")


@pytest.mark.parametrize(
    "text", ["name", "a/b/c", "/a/b", "a/..", "../b", "a/b.gguf", "./a", "a b/c", "a/b:", "a--b/c", "", "/", "a/b:c:d"]
)
def test_what_is_no_name_of_the_hub(text: str) -> None:
    assert parse(text) is None


@pytest.mark.parametrize("revision", ["../x", "/x", "a b", "", "-x"])
def test_a_revision_that_leads_elsewhere_is_refused(revision: str) -> None:
    with pytest.raises(NotFoundError, match="not a valid revision"):
        parse("a/b", revision)


# -- which files -----------------------------------------------------------------------------------------------------
def test_safetensors_come_with_their_sidecar_files_and_no_pickles() -> None:
    chosen = choose(Repo("a", "b"), BERT)
    assert chosen[0] == "model.safetensors"
    assert set(chosen) == {
        "model.safetensors", "config.json", "tokenizer.json", "vocab.txt", "1_Pooling/config.json",
    }  # fmt: skip


def test_all_shards_are_taken_and_some_are_not_enough() -> None:
    index = "model.safetensors.index.json"
    shards = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert choose(Repo("a", "b"), ["config.json", index, *shards, "consolidated.safetensors"])[:4] == (index, *shards)
    with pytest.raises(NotFoundError, match="no complete weights"):
        choose(Repo("a", "b"), ["config.json", index, *shards[:2]])


@pytest.mark.parametrize(
    ("quant", "chosen"),
    [
        ("Q4_K_M", "m-Q4_K_M.gguf"), ("q4_k_m", "m-Q4_K_M.gguf"), ("q8_0", "sub/m.Q8_0.gguf"), ("F16", "m-F16.gguf"),
        ("BF16", "m-BF16.gguf"), ("Q4_K_S", "m-Q4_K_S.gguf"), ("m-F16.gguf", "m-F16.gguf"), ("IQ2_XS", "m-IQ2_XS.gguf"),
    ],
)  # fmt: skip
def test_a_quant_means_one_file(quant: str, chosen: str) -> None:
    names = ["m-Q4_K_M.gguf", "sub/m.Q8_0.gguf", "m-F16.gguf", "m-BF16.gguf", "m-Q4_K_S.gguf", "m-IQ2_XS.gguf"]
    assert choose(Repo("a", "b", quant), [*names, "mmproj-m-F16.gguf", "README.md"]) == (chosen,)


def test_a_split_gguf_is_one_model() -> None:
    names = [f"Q6_K/m-Q6_K-0000{i}-of-00002.gguf" for i in (1, 2)]
    assert choose(Repo("a", "b"), names) == tuple(names)
    assert choose(Repo("a", "b", "Q6_K"), [*names, "m-Q4_0.gguf"]) == tuple(names)
    with pytest.raises(NotFoundError, match="no complete weights"):
        choose(Repo("a", "b"), names[:1])


def test_several_ggufs_and_no_quant_are_listed() -> None:
    with pytest.raises(NotFoundError, match="2 GGUF models, name one") as caught:
        choose(Repo("a", "b"), GGUFS)
    assert "available: Q4_K_M, Q8_0" in "\n".join(caught.value.notes)
    assert caught.value.hint == "a/b:Q4_K_M"


def test_a_quant_that_two_files_have_wants_the_name_of_one() -> None:
    with pytest.raises(NotFoundError, match="2 GGUF models, name one") as caught:
        choose(Repo("a", "b", "Q4_0"), ["x-Q4_0.gguf", "y-Q4_0.gguf"])
    assert caught.value.hint == "a/b:x-Q4_0.gguf"


def test_a_quant_that_is_not_there_lists_those_that_are() -> None:
    with pytest.raises(NotFoundError, match="no GGUF file of 'Q4_K'") as caught:
        choose(Repo("a", "b", "Q4_K"), GGUFS)
    assert "available: Q4_K_M, Q8_0" in "\n".join(caught.value.notes)


def test_names_that_lead_out_of_the_folder_are_not_seen() -> None:
    hostile = ["../m.gguf", "/etc/m.gguf", "a/../../m.gguf", "C:m.gguf"]
    with pytest.raises(NotFoundError, match="no complete weights"):
        choose(Repo("a", "b"), hostile)


# -- caches ----------------------------------------------------------------------------------------------------------
def fill(cache: Path, files: dict[str, bytes], *, repo: str = "models--org--name", ref: str | None = "main") -> Path:
    """A repository in the layout of Hugging Face's libraries: links from snapshots to blobs."""
    folder = cache / repo / "snapshots" / COMMIT
    blobs = cache / repo / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        blob = blobs / sha256(data)
        blob.write_bytes(data)
        (folder / name).symlink_to(os.path.relpath(blob, (folder / name).parent))
    if ref:
        (cache / repo / "refs").mkdir(exist_ok=True)
        (cache / repo / "refs" / ref).write_text(COMMIT)
    return folder


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"])
def test_the_cache_of_other_programs_is_used(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.delenv("HF_HOME")
    below = {"HF_HOME": "hub", "XDG_CACHE_HOME": "huggingface/hub"}.get(variable, "")
    monkeypatch.setenv(variable, str(tmp_path / "theirs"))
    folder = fill(tmp_path / "theirs" / below, BERT)
    files = resolve("org/name", offline=True)
    assert (files.path, files.folder, files.revision) == (folder / "model.safetensors", folder, COMMIT)
    assert files.source == "hub"
    assert locate("hf:org/name") == files
    assert not home.exists()


def test_a_cache_without_a_ref_gives_its_newest_files(home: Path, tmp_path: Path) -> None:
    folder = fill(tmp_path / "hf" / "hub", GGUFS, ref=None)
    older = folder.parent / "older"
    older.mkdir()
    (older / "Tiny-Q8_0.gguf").write_bytes(b"old")
    os.utime(older, (1, 1))
    assert resolve("org/name:Q8_0", offline=True).folder == folder


def test_a_revision_is_a_ref_or_a_commit(home: Path, tmp_path: Path) -> None:
    folder = fill(tmp_path / "hf" / "hub", BERT, ref="v2")
    for revision in ("v2", COMMIT):
        assert resolve("org/name", revision=revision, offline=True).folder == folder
    with pytest.raises(NotFoundError, match="offline"):
        resolve("org/name", revision="v3", offline=True)


def test_one_cached_quant_needs_no_name_and_two_do(home: Path, tmp_path: Path) -> None:
    cache = tmp_path / "hf" / "hub"
    one = {"Tiny-Q8_0.gguf": GGUFS["Tiny-Q8_0.gguf"]}
    fill(cache, one)
    assert resolve("org/name", offline=True).path.name == "Tiny-Q8_0.gguf"
    fill(cache, GGUFS, repo="models--org--two")
    with pytest.raises(NotFoundError, match="org/two: 2 GGUF models, name one"):
        resolve("org/two", offline=True)


def test_an_incomplete_snapshot_is_no_model(home: Path, tmp_path: Path) -> None:
    folder = fill(tmp_path / "hf" / "hub", BERT)
    (folder / "model.safetensors").resolve().unlink()  # a dangling link
    assert locate("org/name") is None
    with pytest.raises(NotFoundError, match="not on this machine, and offline") as caught:
        resolve("org/name", offline=True)
    assert str(tmp_path / "hf" / "hub" / "models--org--name") in "\n".join(caught.value.notes)


def test_a_ref_that_leads_elsewhere_is_not_followed(home: Path, tmp_path: Path) -> None:
    folder = fill(tmp_path / "hf" / "hub", BERT)
    (folder.parent.parent / "refs" / "main").write_text("../../../elsewhere")
    (tmp_path / "elsewhere").mkdir()
    files = locate("org/name")
    assert files is not None
    assert files.folder == folder


def test_what_other_programs_fetched_is_not_removed(home: Path, tmp_path: Path) -> None:
    folder = fill(tmp_path / "hf" / "hub", BERT)
    with pytest.raises(NotFoundError, match="not among the models that rlx fetched") as caught:
        remove("org/name")
    assert str(folder) in "\n".join(caught.value.notes)
    assert (folder / "model.safetensors").exists()


# -- a hub on the loopback -------------------------------------------------------------------------------------------
@dataclass
class Hub:
    """The server's files, its deliberate faults, and the requests it received."""

    repos: dict[str, dict[str, bytes]]
    url: str = ""
    store_url: str = ""  # where large files are redirected to
    status: list[int] = field(default_factory=list)  # error statuses to return before success
    cut: list[int] = field(default_factory=list)  # bytes after which to hang up, per response
    lie: dict[str, Any] = field(default_factory=dict)  # fields to override in the API response for a large file
    siblings: list[dict[str, Any]] = field(default_factory=list)  # extra files in the API response
    ranges: bool = True
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)

    def listing(self, repo: str) -> dict[str, Any]:
        rows: list[dict[str, Any]] = []
        for name, data in self.repos[repo].items():
            row: dict[str, Any] = {"rfilename": name, "size": len(data)}
            if len(data) > 1000:
                row["blobId"] = "0" * 40
                row["lfs"] = {"sha256": sha256(data), "size": len(data), "pointerSize": 130} | self.lie
            else:
                row["blobId"] = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            rows.append(row)
        return {"id": repo, "sha": COMMIT, "siblings": rows + self.siblings}


def handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: Any) -> None:
            pass

        def do_GET(self) -> None:
            hub.asked.append((self.path, {k.lower(): v for k, v in self.headers.items()}))
            if hub.status:
                return self.answer(hub.status.pop(0), b"no")
            parts = self.path.split("?")[0].strip("/").split("/")
            if parts[:2] == ["api", "models"]:
                repo = "/".join(parts[2:4])
                if repo not in hub.repos:
                    return self.answer(404, b"{}")
                return self.answer(200, json.dumps(hub.listing(repo)).encode())
            if parts[0] == "large":
                return self.send(hub.repos["/".join(parts[1:3])]["/".join(parts[3:])])
            data = hub.repos["/".join(parts[:2])]["/".join(parts[4:])]
            assert parts[2:4] == ["resolve", COMMIT]
            if len(data) > 1000:
                place = f"{hub.store_url}/large/{'/'.join(parts[:2])}/{'/'.join(parts[4:])}"
                return self.answer(302, b"", {"Location": place})
            return self.send(data)

        def send(self, data: bytes) -> None:
            wanted = self.headers.get("Range")
            if wanted and hub.ranges:
                start = int(wanted.removeprefix("bytes=").removesuffix("-"))
                return self.answer(206, data[start:])
            return self.answer(200, data)

        def answer(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if hub.cut and len(data) > 1000:
                self.wfile.write(data[: hub.cut.pop(0)])
                self.close_connection = True
                return
            self.wfile.write(data)

    return Handler


@pytest.fixture
def hub(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    fake = Hub({"org/bert": BERT, "org/tiny": GGUFS})
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), handler(fake)) for _ in range(2)]
    threads = [threading.Thread(target=s.serve_forever, args=(0.01,)) for s in servers]
    for thread in threads:
        thread.start()
    fake.url, fake.store_url = (f"http://127.0.0.1:{s.server_port}" for s in servers)
    monkeypatch.setenv("HF_ENDPOINT", fake.url + "/")
    monkeypatch.setattr(huggingface, "_retry_s", lambda attempt: 0.01)
    yield fake
    for server, thread in zip(servers, threads, strict=True):
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_folder_of_safetensors_is_fetched_and_found_again(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    files = resolve("org/bert", quiet=True)
    chosen = choose(Repo("org", "bert"), BERT)
    assert file_hashes(files.folder) == {name: sha256(BERT[name]) for name in chosen}
    assert files.folder == store.home() / "hub" / "models--org--bert" / "snapshots" / COMMIT
    hub.asked.clear()
    monkeypatch.setattr(store, "file_sha256", lambda path: pytest.fail("hashed again"))
    assert resolve("org/bert") == files == resolve("org/bert", revision=COMMIT)
    assert [f.name for f in stored()] == ["org/bert"]
    assert hub.asked == []


def test_one_quant_of_many_is_fetched(hub: Hub) -> None:
    files = resolve("org/tiny:q4_k_m", quiet=True)
    assert file_hashes(files.folder) == {"Tiny-Q4_K_M.gguf": sha256(GGUFS["Tiny-Q4_K_M.gguf"])}
    resolve("org/tiny:Q8_0", quiet=True)
    assert [f.name for f in stored()] == ["org/tiny:Q4_K_M", "org/tiny:Q8_0"]
    assert remove("org/tiny:Q4_K_M") == 60_000
    assert [f.name for f in stored()] == ["org/tiny:Q8_0"]
    assert remove("org/tiny") > 90_000
    assert stored() == []


def test_a_download_that_breaks_off_goes_on_where_it_was(hub: Hub) -> None:
    hub.cut = [10_000, 20_000]
    files = resolve("org/tiny:Q8_0", quiet=True)
    assert sha256(files.path.read_bytes()) == sha256(GGUFS["Tiny-Q8_0.gguf"])
    ranges = [headers.get("range") for path, headers in hub.asked if path.startswith("/large")]
    assert ranges == [None, "bytes=10000-", "bytes=30000-"]


def test_a_pull_that_failed_is_continued_by_the_next(hub: Hub) -> None:
    hub.cut = [1000] * huggingface._TRIES
    with pytest.raises(NotFoundError, match="cannot be fetched from"):
        resolve("org/tiny:Q8_0", quiet=True)
    assert locate("org/tiny:Q8_0") is None
    hub.asked.clear()
    resolve("org/tiny:Q8_0", quiet=True)
    assert [h.get("range") for p, h in hub.asked if p.startswith("/large")] == [f"bytes={1000 * huggingface._TRIES}-"]


def test_a_server_that_knows_no_ranges_sends_all_again(hub: Hub) -> None:
    hub.cut, hub.ranges = [10_000], False
    files = resolve("org/tiny:Q8_0", quiet=True)
    assert sha256(files.path.read_bytes()) == sha256(GGUFS["Tiny-Q8_0.gguf"])


def test_a_large_file_with_another_hash_is_dropped(hub: Hub) -> None:
    hub.lie = {"sha256": "f" * 64}
    with pytest.raises(FormatError, match=r"Tiny-Q8_0.gguf: expected hash ffff"):
        resolve("org/tiny:Q8_0", quiet=True)
    assert locate("org/tiny:Q8_0") is None
    assert not list(store.home().rglob("*.gguf"))


def test_a_small_file_with_another_hash_is_dropped(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    real = hub.listing("org/bert")
    for row in real["siblings"]:
        if row["rfilename"] == "config.json":
            row["blobId"] = "1" * 40
    monkeypatch.setattr(hub, "listing", lambda repo: real)
    with pytest.raises(FormatError, match=r"config.json: expected hash 1111"):
        resolve("org/bert", quiet=True)


def test_more_bytes_than_announced_are_refused(hub: Hub) -> None:
    hub.lie = {"size": 5000}
    with pytest.raises(FormatError, match="sends more than the 5000 bytes"):
        resolve("org/tiny:Q8_0", quiet=True)


def test_a_hostile_listing_writes_nothing_outside(hub: Hub, tmp_path: Path) -> None:
    hub.siblings = [{"rfilename": "../../../../evil.json", "size": 1}, {"rfilename": "/evil.json"}, {"x": 1}, "y"]  # type: ignore[list-item]
    resolve("org/bert", quiet=True)
    assert not list(tmp_path.rglob("evil*"))


def test_the_token_goes_to_the_hub_and_to_nobody_else(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret-of-the-test")
    resolve("org/tiny:Q8_0", quiet=True)
    carried = {path.split("/")[1]: "authorization" in headers for path, headers in hub.asked}
    assert carried == {"api": True, "org": True, "large": False}


@pytest.mark.parametrize(
    ("statuses", "message"),
    [([404], "has no such model"), ([401], r"refuses it \(401\)"), ([403], "HF_TOKEN"), ([500] * 9, "status 500")],
)
def test_what_the_hub_refuses_is_explained(hub: Hub, statuses: list[int], message: str) -> None:
    hub.status = statuses
    with pytest.raises(NotFoundError) as caught:
        resolve("org/bert", quiet=True)
    assert re.search(message, "\n".join([str(caught.value), *caught.value.notes]))


def test_a_busy_hub_is_asked_again(hub: Hub) -> None:
    hub.status = [503, 429]
    resolve("org/bert", quiet=True)


def test_an_unknown_model_is_not_found(hub: Hub) -> None:
    with pytest.raises(NotFoundError, match="no/such: the hub has no such model or revision"):
        resolve("no/such")


def test_an_answer_that_is_not_the_hubs_is_refused(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "listing", lambda repo: {"sha": "../../x", "siblings": []})
    with pytest.raises(FormatError, match="does not answer as the hub does"):
        resolve("org/bert")


@pytest.mark.parametrize("variable", ["RLX_OFFLINE", "HF_HUB_OFFLINE"])
def test_offline_asks_nobody(hub: Hub, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(NotFoundError, match="not on this machine, and offline"):
        resolve("org/bert")
    assert hub.asked == []


def test_nobody_at_the_endpoint_is_said(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "_retry_s", lambda attempt: 0.0)
    with pytest.raises(NotFoundError, match=r"cannot be fetched from http://127.0.0.1:9: .*refused"):
        resolve("org/bert")
    monkeypatch.setenv("HF_ENDPOINT", "file:///etc")
    with pytest.raises(NotFoundError, match="not an https URL"):
        resolve("org/bert")


def test_a_full_disk_is_said_before_the_first_byte(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CapabilityError, match="is full"):
        resolve("org/bert")
    assert not [path for path, _ in hub.asked if path.startswith("/large")]


def test_threads_that_resolve_at_once_fetch_once(hub: Hub) -> None:
    results = []
    threads = [threading.Thread(target=lambda: results.append(resolve("org/bert", quiet=True))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(results)) == 1 and len(results) == 4
    assert sum(path.startswith("/large") for path, _ in hub.asked) == 1


# -- snapshots that other programs fetched in part -------------------------------------------------------------------
SENTENCES = BERT | {"modules.json": b"[]", "tokenizer_config.json": b"{}"}


def part(*left_out: str) -> dict[str, bytes]:
    return {name: data for name, data in SENTENCES.items() if name not in left_out}


def test_a_snapshot_without_its_tokenizer_is_no_model_offline(home: Path, tmp_path: Path) -> None:
    folder = fill(tmp_path / "hf" / "hub", part("tokenizer.json"))
    assert locate("org/name") is None
    with pytest.raises(NotFoundError, match="not on this machine, and offline") as caught:
        resolve("org/name", offline=True)
    assert f"{folder} has only a part of it: tokenizer.json is missing" in "\n".join(caught.value.notes)


def test_files_in_doubt_are_named_offline_with_the_consequence(
    home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path / "hf" / "hub", part("modules.json"))
    assert resolve("org/name", offline=True).in_doubt == ("modules.json",)
    assert "modules.json is not in" in caplog.text and "not normalised" in caplog.text


def test_a_model_that_writes_text_needs_no_modules(home: Path, tmp_path: Path) -> None:
    writes = {"config.json": b'{"architectures": ["LlamaForCausalLM"]}'}
    fill(tmp_path / "hf" / "hub", part("modules.json") | writes)
    files = locate("org/name")
    assert files is not None and not files.in_doubt


@pytest.mark.parametrize("left_out", ["modules.json", "tokenizer.json", "tokenizer_config.json"])
def test_what_a_snapshot_lacks_is_fetched_and_the_weights_are_not(hub: Hub, tmp_path: Path, left_out: str) -> None:
    hub.repos["org/name"] = SENTENCES
    theirs = fill(tmp_path / "hf" / "hub", part(left_out))
    files = resolve("org/name", quiet=True)
    assert (files.folder / left_out).read_bytes() == SENTENCES[left_out]
    assert files.path.samefile(theirs / "model.safetensors") and not files.in_doubt
    assert not [path for path, _ in hub.asked if path.startswith("/large")]
    hub.asked.clear()
    assert resolve("org/name") == files
    assert hub.asked == []


def test_a_repository_without_a_tokenizer_is_complete_without_it(hub: Hub) -> None:
    hub.repos["org/name"] = part("tokenizer.json", "modules.json", "tokenizer_config.json")
    files = resolve("org/name", quiet=True)
    assert files == resolve("org/name", offline=True) == stored()[0]


def test_a_fetch_that_stopped_between_two_files_is_no_model(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["org/name"] = SENTENCES

    def stop(repo: Repo, remote: Any, path: Path) -> None:
        if remote.name == "vocab.txt":
            raise KeyboardInterrupt

    monkeypatch.setattr(huggingface, "_check", stop)
    with pytest.raises(KeyboardInterrupt):
        resolve("org/name", quiet=True)
    assert locate("org/name") is None and stored() == []


def test_a_damaged_file_of_another_program_is_not_taken_over(hub: Hub, tmp_path: Path) -> None:
    hub.repos["org/name"] = SENTENCES
    theirs = fill(tmp_path / "hf" / "hub", part("tokenizer.json") | {"model.safetensors": bytes(70_000)})
    files = resolve("org/name", quiet=True)
    assert sha256(files.path.read_bytes()) == sha256(SENTENCES["model.safetensors"])
    assert (theirs / "model.safetensors").read_bytes() == bytes(70_000)


def test_without_a_network_a_snapshot_in_doubt_is_used(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface, "_retry_s", lambda attempt: 0.0)
    folder = fill(tmp_path / "hf" / "hub", part("modules.json"))
    assert resolve("org/name").folder == folder
