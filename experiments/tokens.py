"""Text files to a file of tokens for experiments.pretrain: each file is a document.

    python -m experiments.tokens my_texts/ --bpe 8192 --out runs/tokens
    python -m experiments.pretrain --data runs/tokens/tokens.npy --pack

Leaves tokens.npy, what is known of it in tokens.npy.json, and with --bpe the tokenizer in tokenizer.json.
"""

from __future__ import annotations

from argparse import ArgumentParser, RawTextHelpFormatter
from collections.abc import Iterator
from pathlib import Path

import jzero
from jzero.data import BPE, Bytes, train_bpe, write_tokens


def main(argv: list[str] | None = None) -> None:
    p = ArgumentParser("tokens", "%(prog)s PATH... [options]", __doc__, formatter_class=RawTextHelpFormatter)
    p.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="text files, and directories of them")
    p.add_argument("--files", default="*.txt", metavar="PATTERN", help="which ones of a directory (default *.txt)")
    p.add_argument("--bpe", type=int, metavar="SIZE", help="train a BPE of so many tokens (default: bytes)")
    p.add_argument("--out", type=Path, default=Path("runs/tokens"), help="directory (default runs/tokens)")
    args = p.parse_args(argv)
    try:
        files = [file for path in args.paths for file in _files(path, args.files)]
        tokenizer: BPE | Bytes = Bytes() if args.bpe is None else train_bpe(texts(files), args.bpe)
        args.out.mkdir(parents=True, exist_ok=True)
        if isinstance(tokenizer, BPE):
            tokenizer.save(args.out / "tokenizer.json")
        count = write_tokens(texts(files), args.out / "tokens.npy", tokenizer)
    except (jzero.ConfigError, OSError) as error:
        p.exit(2, f"tokens: {error}\n")
    size = sum(file.stat().st_size for file in files)
    print(f"{args.out / 'tokens.npy'}: {count:,} tokens of {tokenizer.vocab_size:,} kinds")
    print(f"{len(files):,} documents, {size / count:.2f} bytes a token")


def texts(files: list[Path]) -> Iterator[str]:
    """The files' texts, one at a time; what is no UTF-8 is replaced."""
    return (file.read_text(errors="replace") for file in files)


def _files(path: Path, pattern: str) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.rglob(pattern) if file.is_file())
    if not found:
        raise jzero.ConfigError(f"{path}: has no files like --files {pattern}")
    return found


if __name__ == "__main__":
    main()
