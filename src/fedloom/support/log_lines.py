"""Log lines that nothing in a message can imitate."""

import logging


class TextFormatter(logging.Formatter):
    """Lines that begin with the time, or as `form` says. Further lines of a message are indented
    and control characters replaced, so that nothing that a caller sent can imitate a log line or
    control a terminal.
    """

    def __init__(self, form: str = "%(asctime)s %(levelname)s %(name)s: %(message)s") -> None:
        super().__init__(form)

    def format(self, record: logging.LogRecord) -> str:
        """The line, or several."""
        lines = super().format(record).splitlines()
        return "\n    ".join("".join(c if c.isprintable() else "�" for c in line) for line in lines)
