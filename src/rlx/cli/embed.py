"""`rlx embed [TEXT ...]`: vectors of texts, or a ranked search over a file of lines."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from rlx.engine.model import load
from rlx.errors import RequestError

DEFAULT = "minilm-l6"


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("embed", help="vectors of texts, or a search over lines")
    command.add_argument("texts", nargs="*", help="texts")
    command.add_argument("-m", "--model", default=DEFAULT)
    command.add_argument("--file", type=Path, help="one text a line")
    command.add_argument("--out", type=Path, help="write the vectors to this .npy file")
    command.add_argument("--query", help="rank the texts by how close they are to this one")
    command.add_argument("--top", type=int, default=10, help="with --query: how many to show")
    command.add_argument("--threads", type=int)
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    texts = list(arguments.texts)
    if arguments.file is not None:
        try:
            texts += arguments.file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"embed: {arguments.file} cannot be read: {error}") from error
    if not texts:
        raise RequestError("embed: there are no texts", hint="rlx embed 'a text' or rlx embed --file lines.txt")
    model = load(arguments.model, threads=arguments.threads)
    vectors = model.embed(texts)
    if arguments.query is not None:
        scores = vectors @ model.embed(arguments.query)
        for i in np.argsort(-scores, kind="stable")[: arguments.top]:
            print(f"{scores[i]:.4f}  {texts[i]}")
    elif arguments.out is not None:
        np.save(arguments.out, vectors)
        print(f"{len(texts)} vectors of {vectors.shape[1]} in {arguments.out}", file=sys.stderr)
    else:
        for row in vectors:
            print(json.dumps([round(float(v), 6) for v in row]))
    return 0
