"""Which of two words of a label says that an event happened, as in survival analysis.

It is guessed only where the words leave no doubt: the wrong one turns every hazard around.
"""

from collections.abc import Sequence
from typing import Final

EVENTS: Final = frozenset(("dead", "death", "deceased", "died", "event", "relapse", "relapsed"))
"""Words that say in any label that the event happened."""
_CODES: Final = {("0", "1"), ("0.0", "1.0"), ("false", "true")}
_OPPOSITE: Final = ("surviv", "aliv", "living", "censor", "free", "no_", "no ", "not", "remission")
"""Parts of a label's name that turn its codes around: 1 of `survived` is no death."""


def guessed_event(classes: Sequence[str], label: str = "") -> str | None:
    """The event among the two words of a label, or None if they do not say which it is.

    Example:
        >>> guessed_event(["living", "deceased"]), guessed_event(["0", "1"], "died")
        ('deceased', '1')
        >>> guessed_event(["1", "2"]), guessed_event(["0", "1"], "survived")
        (None, None)
    """
    if len(classes) != 2:
        return None
    plain = [word.strip().casefold() for word in classes]
    found = [word for word, low in zip(classes, plain, strict=True) if low in EVENTS]
    turned = any(part in label.casefold() for part in _OPPOSITE)
    if not found and not turned and tuple(sorted(plain)) in _CODES:
        found = [classes[plain.index(max(plain))]]
    return found[0] if len(found) == 1 else None


def which_event(classes: Sequence[str], given: str) -> str | None:
    """The word of a label that a setting names, in any case if no other is written so; None for
    another word.

    Example:
        >>> which_event(["False", "True"], "true"), which_event(["no", "yes"], "dead")
        ('True', None)
    """
    if given in classes:
        return given
    alike = [word for word in classes if word.strip().casefold() == given.strip().casefold()]
    return alike[0] if len(alike) == 1 else None
