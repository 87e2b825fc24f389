"""Encode text into a file of tokens for experiments.pretrain: a text file, or a line of JSONL, is a document.

    python -m experiments.tokens my_texts/ --bpe 8192 --out runs/tokens
    python -m experiments.pretrain --data runs/tokens/tokens.npy --pack

Writes tokens.npy, a note about it in tokens.npy.json, and with --bpe the tokenizer in tokenizer.json.
"""

from __future__ import annotations

from argparse import ArgumentParser, RawTextHelpFormatter
from collections.abc import Iterator
from pathlib import Path

import jzero
from experiments.tokenizers import Bytes, train_bpe
from jzero.data import write_tokens
from jzero.data.tokens import documents, token_note


def main(argv: list[str] | None = None) -> None:
    p = ArgumentParser("tokens", "%(prog)s PATH... [options]", __doc__, formatter_class=RawTextHelpFormatter)
    p.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="text files, JSONL files, or directories")
    p.add_argument("--files", default="*.txt", metavar="PATTERN", help="files to take from a directory (default *.txt)")
    p.add_argument("--bpe", type=int, metavar="SIZE", help="train a BPE with at most SIZE tokens (default: bytes)")
    p.add_argument("--out", type=Path, default=Path("runs/tokens"), help="output directory (default runs/tokens)")
    args = p.parse_args(argv)
    try:
        files = [file for path in args.paths for file in _files(path, args.files)]
        tokenizer = Bytes() if args.bpe is None else train_bpe(texts(files), args.bpe)
        args.out.mkdir(parents=True, exist_ok=True)
        if args.bpe is not None:
            tokenizer.save(str(args.out / "tokenizer.json"))
        count = write_tokens(texts(files), args.out / "tokens.npy", tokenizer)
    except (jzero.ConfigError, OSError) as error:
        p.exit(2, f"tokens: {error}\n")
    size = sum(file.stat().st_size for file in files)
    note = token_note(args.out / "tokens.npy")
    print(f"{args.out / 'tokens.npy'}: {count:,} tokens, vocabulary {note['vocab_size']:,}")
    print(f"{note['documents']:,} documents, {size / count:.2f} bytes per token")


def texts(files: list[Path]) -> Iterator[str]:
    """Read the documents one at a time; in text files invalid UTF-8 is replaced."""
    for file in files:
        yield from documents(file if file.suffix == ".jsonl" else [file.read_text(errors="replace")])


def _files(path: Path, pattern: str) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.rglob(pattern) if file.is_file())
    if not found:
        raise jzero.ConfigError(f"{path} contains no files that match --files {pattern}")
    return found


if __name__ == "__main__":
    main()
