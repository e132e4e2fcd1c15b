"""Search text files by meaning: embed their paragraphs and show those closest to a question.

    python examples/search.py "how do I undo a commit?" ~/notes docs/*.md
    python examples/search.py "gradients of loops" docs --top 5 --index docs-index

Folders are searched for .md, .txt and .rst files. `--index` keeps the index, so that only new and changed paragraphs
are embedded the next time.
"""

import argparse
import re
import tempfile
from functools import partial
from pathlib import Path
from textwrap import shorten

import rlx

SUFFIXES = {".md", ".txt", ".rst"}


def text_files(paths):
    """The files among the paths, and the text files in the folders."""
    for path in paths:
        yield from sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES) if path.is_dir() else [path]


def paragraphs(path):
    """Paragraphs of a file with the line that each begins on. Blank lines separate them."""
    text = path.read_text("utf-8", errors="replace")
    for match in re.finditer(r"\S.*?(?=\n\s*\n|\s*\Z)", text, re.S):
        yield text.count("\n", 0, match.start()) + 1, match[0]


def update(index, texts):
    """Embed the texts, by place, that the index does not have, and delete those that are gone or changed."""
    before = dict(zip(index.ids(), index.texts(), strict=True))
    index.delete([place for place, text in before.items() if texts.get(place) != text])
    new = {place: text for place, text in texts.items() if before.get(place) != text}
    if new:
        index.append(ids=list(new), texts=list(new.values()))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question")
    parser.add_argument("paths", nargs="+", type=Path, help="text files and folders")
    parser.add_argument("--model", default="minilm-l6", help="an embedding model (default: %(default)s)")
    parser.add_argument("--top", type=int, default=3, help="paragraphs to show (default: %(default)s)")
    parser.add_argument("--index", type=Path, help="folder to keep the index in")
    args = parser.parse_args(argv)

    texts = {f"{path}:{line}": text for path in text_files(args.paths) for line, text in paragraphs(path)}
    if not texts:
        parser.error("no text in these paths")
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.index or Path(temporary) / "index"
        open_index = partial(rlx.Index.open, write=True) if folder.exists() else rlx.Index.create
        with open_index(folder, model=args.model) as index:
            update(index, texts)
            best = index.search(args.question, k=args.top)
    for hit in best:
        print(f"{hit.score:.2f}  {hit.id}\n      {shorten(hit.text, 100, placeholder=' ...')}")
    return best


if __name__ == "__main__":
    main()
