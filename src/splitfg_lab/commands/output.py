"""Standard output and standard error: any encoding, any width, and clear errors if they cannot be written."""

from __future__ import annotations

import codecs
import errno
import io
import os
import sys
import textwrap
import unicodedata
from contextlib import suppress
from typing import Final

import typer

_HANDLER: Final = "splitfg_plain"
_PLAIN: Final = str.maketrans(
    {
        "±": "+-", "×": "x", "·": ".", "…": "...", "→": "->", "←": "<-", "↦": "->", "−": "-", "–": "-", "—": "-",
        "≤": "<=", "≥": ">=", "≈": "~", "≠": "!=", "∞": "inf", "√": "sqrt", "‖": "||", "⟨": "<", "⟩": ">", "•": "*",
        "ρ": "rho", "θ": "theta", "σ": "sigma", "λ": "lambda", "β": "beta", "α": "alpha", "ε": "eps", "χ": "chi",
        "Δ": "Delta", "∂": "d", "²": "^2", "³": "^3", "₀": "0", "₁": "1", "“": '"', "”": '"', "‘": "'", "’": "'",
        "│": "|", "┃": "|", "▌": "|", "✓": "yes", "✗": "no", "★": "*", "▲": "^", "▼": "v", "⋅": ".",
    }
)  # fmt: skip


def use_any_encoding() -> None:
    """Let standard output and standard error replace characters that their encoding does not have.

    ``±`` becomes ``+-`` in ASCII; accents are dropped; anything else becomes ``?``.
    """
    codecs.register_error(_HANDLER, _replace)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_HANDLER)


def plain(text: str) -> str:
    """Write text in ASCII."""
    simple = unicodedata.normalize("NFKD", text.translate(_PLAIN))
    kept = "".join(c for c in simple if not unicodedata.combining(c))
    return "".join(c if c.isascii() else _line_drawing(c) for c in kept)


def _line_drawing(character: str) -> str:
    name = unicodedata.name(character, "")
    if name.startswith("BOX DRAWINGS"):
        return "-" if "HORIZONTAL" in name and "VERTICAL" not in name else "+"
    return "?"


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return plain(error.object[error.start : error.end]), error.end


def print_error(message: str) -> None:
    """Print an error, wrapped at words if standard error is a terminal."""
    text = f"error: {message}"
    if sys.stderr.isatty():
        width = os.get_terminal_size(sys.stderr.fileno()).columns or 80
        text = "\n".join(_wrap(line, max(width, 20)) for line in text.splitlines())
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _wrap(line: str, width: int) -> str:
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def print_coloured(text: str, colour: str, *, err: bool = False) -> None:
    """Print text, in colour in a terminal unless ``NO_COLOR`` is set, which rich follows too."""
    typer.secho(text, fg=None if os.environ.get("NO_COLOR") else colour, err=err)


def explain(error: OSError) -> str:
    """Describe an ``OSError``; without a file name it comes from standard output."""
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename else f"cannot write the output: {reason}"


def flush_output() -> None:
    """Write buffered output now, so that a failure is reported as an error and not after the exit.

    Raises:
        OSError: The output cannot be written, and further output is discarded.
    """
    try:
        sys.stdout.flush()
    except OSError:
        discard_output()
        raise


def discard_output() -> None:
    """Send further output to the null device: the interpreter flushes again at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def is_closed_pipe(error: OSError) -> bool:
    """Return whether the reader of the output has gone, as ``head`` does."""
    return error.errno == errno.EPIPE
