"""Search text files by meaning: embed their paragraphs and show those closest to a question.

    python examples/search.py "how do I undo a commit?" ~/notes docs/*.md
    python examples/search.py "gradients of loops" docs --top 5 --index docs.npz

Folders are searched for .md, .txt and .rst files. `--index` keeps the vectors in a file, so that only new and changed
paragraphs are embedded the next time.
"""

import argparse
import re
from pathlib import Path
from textwrap import shorten

import numpy as np

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


def embedded(model, texts, index):
    """Vectors [texts, dim]; those that the index file has are not computed again."""
    known = dict(zip(*np.load(index).values(), strict=True)) if index and index.exists() else {}
    new = [text for text in dict.fromkeys(texts) if text not in known]
    known |= zip(new, model.embed(new), strict=True)
    vectors = np.stack([known[text] for text in texts])
    if index:
        np.savez(index, texts=np.array(texts), vectors=vectors)
    return vectors


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question")
    parser.add_argument("paths", nargs="+", type=Path, help="text files and folders")
    parser.add_argument("--model", default="minilm-l6", help="an embedding model (default: %(default)s)")
    parser.add_argument("--top", type=int, default=3, help="paragraphs to show (default: %(default)s)")
    parser.add_argument("--index", type=Path, help=".npz file to keep vectors in")
    args = parser.parse_args(argv)

    places = [(path, line, text) for path in text_files(args.paths) for line, text in paragraphs(path)]
    if not places:
        parser.error("no text in these paths")
    model = rlx.load(args.model)
    vectors = embedded(model, [text for _, _, text in places], args.index)
    scores = model.similarity(args.question, vectors)
    best = [(*places[i], scores[i]) for i in np.argsort(-scores)[: args.top]]
    for path, line, text, score in best:
        print(f"{score:.2f}  {path}:{line}\n      {shorten(text, 100, placeholder=' ...')}")
    return best


if __name__ == "__main__":
    main()
