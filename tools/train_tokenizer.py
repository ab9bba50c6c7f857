"""Train a tokenizer on a corpus, and write it as a Hugging Face folder for data.tokenizer.

    python tools/train_tokenizer.py corpus.jsonl my-bpe --vocab-size 32000
    python tools/train_tokenizer.py texts/ my-unigram --kind unigram --vocab-size 16000
    python tools/train_tokenizer.py texts/ my-bytes --kind byte_bpe --vocab-size 32000

bpe is the kind that train.py trains without data.tokenizer: SentencePiece's BPE, which keeps every
space and writes characters without a piece as bytes. unigram is SentencePiece's other algorithm.
byte_bpe is byte-level BPE with GPT-2's text splitting, from the library tokenizers. The same text
gives the same files; text above 48 million characters is sampled evenly. Compare tokenizers
with tools/compare_tokenizers.py. Exit code 0; 2 for input with problems; 74 if the disk is full; 75
if it was stopped, with nothing written.
"""

import argparse
import shutil
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from harness.errors import ConfigError, ExitCode, is_full_disk
from harness.files.paths import option_path
from harness.terminal import command_parser, say
from tools.workers import Stopped, stopping

KINDS = ("bpe", "unigram", "byte_bpe")
_LEAST = 300  # 256 bytes, special tokens and some pieces
_MOST = 1 << 24


def main(argv: list[str]) -> int:
    """Run the command: argv -> a tokenizer's folder -> exit code."""
    parser, add = command_parser(__doc__)
    add("input", metavar="IN", help="Text in any format that data.path reads.")
    add("output", type=option_path, metavar="OUT", help="Folder to create.")
    add("--kind", choices=KINDS, default="bpe", help="Kind of tokenizer (default: %(default)s).")
    add("--vocab-size", type=int, default=8192, help="Vocabulary size (default: %(default)s).")
    add("--text", metavar="COLUMN", help="Column with the text (default: text).")
    add("--no-byte-fallback", action="store_true", help="Turn rare characters into <unk>.")
    args = parser.parse_args(argv)
    temporary = args.output.with_name(f".{args.output.name}.partial")
    try:
        with stopping():
            return _train(args, temporary)
    except Stopped as stop:
        say(f"stopped by {stop}; nothing was written: the same command starts over", sys.stderr)
        return int(ExitCode.STOPPED)
    except ConfigError as error:
        problems = [text.replace("data.path: ", "IN: ", 1) for text in error.problems]
        problems = [text.replace("data.vocab_size", "--vocab-size", 1) for text in problems]
        say(f"cannot train: {ConfigError(problems)}", sys.stderr)
        return int(error.code)
    except OSError as error:
        say(f"cannot train: {error}", sys.stderr)
        return int(ExitCode.CANNOT_SAVE) if is_full_disk(error) else 1
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _train(args: argparse.Namespace, temporary: Path) -> int:
    from harness.files.corpus import find_corpus  # imports numpy and more
    from harness.files.splits import ALL

    problems = []
    if not _LEAST <= args.vocab_size <= _MOST:
        problems.append(
            f"--vocab-size is {args.vocab_size}: it must be between {_LEAST} and {_MOST:,}"
        )
    if args.output.exists():
        problems.append(f"OUT: {args.output} exists: remove it, or choose another name")
    elif not args.output.absolute().parent.is_dir():
        problems.append(f"OUT: there is no folder {args.output.absolute().parent}")
    if args.no_byte_fallback and args.kind == "byte_bpe":
        problems.append("--no-byte-fallback: byte_bpe consists of bytes; choose another --kind")
    corpus = None
    try:
        columns = {} if args.text is None else {"text": args.text}
        corpus = find_corpus(args.input, columns=columns, split=ALL)
        if corpus.kind == "indexed":
            problems.append(f"IN: {corpus.path} contains token ids: give the text")
    except ConfigError as error:
        problems += error.problems
    if problems or corpus is None:
        raise ConfigError(problems)
    from harness.data.tokenizer import load_tokenizer, vocab_size
    from tools.tokenizing.training import train

    train(args.kind, corpus, temporary, args.vocab_size, not args.no_byte_fallback)
    pieces = vocab_size(load_tokenizer(temporary))
    temporary.rename(args.output)
    fewer = (
        "" if pieces == args.vocab_size else f" (of {args.vocab_size:,}, because the text is short)"
    )
    say(f"{args.output}: {pieces:,} pieces{fewer}; train with data.tokenizer={args.output}")
    return int(ExitCode.DONE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
