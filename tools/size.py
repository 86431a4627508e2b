"""Code words per folder: what the house has a budget for.

    python tools/size.py            # the table
    python tools/size.py --lines    # with lines, comments and the width of lines

A code word is a token of Python. Comments, docstrings and blank space are free, so that nobody is
paid for leaving out a reason. What a formatter adds is free, too: a comma before a closing
bracket, and the pieces that a long string is cut into, count nothing.
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "fedloom"
_FREE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_CLOSING = {")", "]", "}"}


def docstrings(text: str) -> set[tuple[int, int]]:
    """Line and column of each string that stands alone as a statement: of modules, classes,
    functions, and of what is assigned in the line above.
    """
    return {
        (node.lineno, node.col_offset)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }


def code_words(text: str) -> int:
    """The code words of a file.

    >>> code_words('x = f(1, 2)  # why')
    8
    >>> code_words('x = f(1, 2,)'), code_words('x = ("a" "b")') == code_words('x = ("ab")')
    (8, True)
    """
    documented = docstrings(text)
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in _FREE and token.start not in documented
    ]
    following = [*tokens, None][1:]
    return sum(
        not (token.string == "," and after is not None and after.string in _CLOSING)
        and not (token.type == tokenize.STRING and after is not None and after.type == token.type)
        for token, after in zip(tokens, following, strict=True)
    )


def sizes(source: Path = SOURCE) -> dict[str, int]:
    """Code words of each folder below the source, and of the files beside them ("fedloom")."""
    total: Counter[str] = Counter()
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).parts
        total[parts[0] if len(parts) > 1 else source.name] += code_words(path.read_text("utf-8"))
    return dict(total)


def air(source: Path = SOURCE) -> str:
    """Lines, the share that are comments, and how wide lines of code are."""
    lines = [line for path in source.rglob("*.py") for line in path.read_text("utf-8").split("\n")]
    filled = [line for line in lines if line.strip()]
    comments = sum(line.lstrip().startswith("#") or "  # " in line for line in filled)
    width = sum(map(len, filled)) / len(filled)
    wide = sum(len(line) > 100 for line in filled) / len(filled)
    return (
        f"{len(lines):,} lines; {comments / len(filled):.1%} with a comment; mean width "
        f"{width:.0f}; {wide:.1%} beyond 100 columns"
    )


def main() -> None:
    """Print the table."""
    found = sizes()
    for folder, words in sorted(found.items(), key=lambda entry: -entry[1]):
        print(f"{folder:<12}{words:>9,}")
    print(f"{'all':<12}{sum(found.values()):>9,}")
    if "--lines" in sys.argv[1:]:
        print(air())


if __name__ == "__main__":
    main()
