"""The catalogue: unambiguous names, complete hashes, and facts that agree with the assets page."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import rlx.models.load  # noqa: F401  declares the families
from rlx.hub import catalogue, huggingface
from rlx.hub.catalogue import CATALOGUE, Archive, Entry, File, Piece, find, is_safe_name
from rlx.models.family import FAMILIES

ENTRIES = pytest.mark.parametrize("entry", CATALOGUE.values(), ids=lambda e: e.name)
HASH = re.compile(r"\b[0-9a-f]{64}\b")


def facts(entry: Entry) -> list[tuple[int, str]]:
    """Size and sha256 of every archive and file of an entry."""
    pieces = [(p.size, p.sha256) for f in entry.files for p in f.pieces]
    return pieces + [(f.size, f.sha256) for f in entry.files] + [(a.size, a.sha256) for a in entry.archives]


@ENTRIES
def test_what_is_called_supported_has_a_family(entry: Entry) -> None:
    assert entry.supported == (entry.family in FAMILIES)


@ENTRIES
def test_every_hash_is_whole_and_every_size_positive(entry: Entry) -> None:
    for size, sha256 in facts(entry):
        assert size > 0
        assert HASH.fullmatch(sha256)


@ENTRIES
def test_a_piece_that_is_a_whole_file_has_its_hash(entry: Entry) -> None:
    for file in entry.files:
        if len(file.pieces) == 1:
            assert file.pieces[0].sha256 == file.sha256


@ENTRIES
def test_pieces_of_one_file_follow_the_order_of_the_archives(entry: Entry) -> None:
    """Archives are fetched one after the other, and pieces are appended in order."""
    for file in entry.files:
        places = [entry.archives.index(p.archive) for p in file.pieces]
        assert places == sorted(places)


@ENTRIES
def test_a_name_and_its_aliases_mean_the_entry_in_any_case(entry: Entry) -> None:
    for name in (entry.name, *entry.aliases):
        assert name == name.lower()
        assert find(name) is find(name.upper()) is entry
        assert huggingface.parse(name) is None


def test_no_name_is_given_twice() -> None:
    assert len(catalogue.names()) == len(set(catalogue.names()))
    assert catalogue.DEFAULT in CATALOGUE


def test_every_hash_of_the_assets_page_is_in_the_catalogue() -> None:
    assets = Path(os.environ.get("RLX_ASSETS", Path(__file__).parents[3] / "shared" / "assets"))
    if not (assets / "README.md").exists():
        pytest.skip("no assets page here")
    page = (assets / "README.md").read_text()
    known = {fact for entry in CATALOGUE.values() for fact in facts(entry)}
    assert set(HASH.findall(page)) <= {sha256 for _, sha256 in known}
    assert {1117320768, 253113024, 60816028} <= {size for size, _ in known}


@pytest.mark.parametrize(
    "name", ["../x", "/x", "a/../b", "a//b", "./a", "", ".", "..", "a\\b", "c:x", ".hidden", "a/.b", "a\0", "a/"]
)
def test_a_name_that_leaves_its_folder_is_not_safe(name: str) -> None:
    assert not is_safe_name(name)
    with pytest.raises(ValueError, match="not a valid file name"):
        File(name, 0, "", ())


def test_a_file_whose_pieces_do_not_add_up_cannot_be_declared() -> None:
    archive = Archive("pypi", "p", "1", 1, "")
    with pytest.raises(ValueError, match="3 bytes, but its pieces have 2"):
        File("x", 3, "", (Piece(archive, "m", 2, ""),))
