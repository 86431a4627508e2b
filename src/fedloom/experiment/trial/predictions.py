"""What candidates of a trial predict, and the ways to predict that are composed of them."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from fedloom.core.errors import MethodError
from fedloom.core.ledger import Ledger
from fedloom.experiment.trial.candidates import JOINT, OWN, Candidate


@dataclass(frozen=True, order=True)
class Recipe:
    """One way to train and to predict: the number of a candidate, of rounds, and an evaluation
    mode.
    """

    candidate: int
    rounds: int
    mode: str


MIX = Recipe(-1, 0, "")
"""The mean of the probabilities of the black boxes."""
HALF = "half by own models"
"""What the equal mix of the model of all with own ones is called."""
PERSONAL = "own weight for each owner"
"""The mode of a mix of the model of all with one of the owner's own rows, by weights of each owner:
see `personal`.
"""


@dataclass(eq=False)
class Boxes:
    """What the black boxes predict that each of N owners trains in one repeat, by their numbers.

    Attributes:
        own: (n, K) of all rows by their owner's model, which did not see them; or numbers (n, 1).
        all: (n, K) the mean of all owners' models.
        elsewhere: (N, n, K) by each owner's model, if it is kept.
        done: the folds that are trained, and whether they predict the rows of all owners.
    """

    own: dict[int, np.ndarray] = field(default_factory=dict)
    all: dict[int, np.ndarray] = field(default_factory=dict)
    elsewhere: dict[int, np.ndarray] = field(default_factory=dict)
    done: dict[int, dict[int, bool]] = field(default_factory=dict)


@dataclass(eq=False)
class Predictions:
    """What candidates predict.

    Attributes:
        candidates: in the order in which they are tried.
        guess: of a model that diverged: 1 / K, or the mean number.
        first: for each recipe, (n, K) of all rows in the first repeat, by models that did not see
            the row; or numbers (n, 1).
        choices: for each repeat, the recipe of each fold that the first repeat's other rows chose.
        chosen: for each repeat, (n, K) by the recipes of `choices`.
        ledgers: the messages of one training, by recipe.
        dropped: numbers of the candidates that cannot be trained.
        weights: for each recipe of the mode `PERSONAL`, (N,) of the owners' own models.
    """

    candidates: list[Candidate]
    guess: float
    first: dict[Recipe, np.ndarray] = field(default_factory=dict)
    choices: list[list[Recipe]] = field(default_factory=list)
    chosen: list[np.ndarray] = field(default_factory=list)
    ledgers: dict[Recipe, Ledger] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)
    weights: dict[Recipe, np.ndarray] = field(default_factory=dict)

    def set(
        self,
        into: dict[Recipe, np.ndarray],
        recipe: Recipe,
        rows: np.ndarray,
        found: np.ndarray,
        n: int,
    ) -> None:
        """Set the predictions of these of n rows; a guess where training diverged."""
        whole = into.setdefault(recipe, np.full((n, found.shape[1]), self.guess))
        whole[rows] = np.where(np.isfinite(found).all(1, keepdims=True), found, self.guess)

    def failed(self, number: int) -> bool:
        """Whether the candidate was dropped."""
        return number in self.dropped

    def drop(self, number: int, error: MethodError) -> None:
        """Forget a candidate that cannot be trained.

        Raises:
            MethodError: there is no other.
        """
        self.dropped.add(number)
        if len(self.dropped) == len(self.candidates):
            raise error
        for recipe in [one for one in self.first if one.candidate == number]:
            del self.first[recipe]

    def boxes(self) -> list[int]:
        """The numbers of the black boxes whose mean is `MIX`."""
        return [n for n, one in enumerate(self.candidates) if not one.model and not self.failed(n)]

    def trained(self, recipe: Recipe) -> list[int]:
        """The numbers of the candidates that a recipe needs."""
        return self.boxes() if recipe == MIX else [recipe.candidate]

    def composed(
        self, recipe: Recipe, each: Mapping[Recipe, np.ndarray], own: np.ndarray
    ) -> np.ndarray:
        """The predictions (n, K) of a recipe from those of what was trained; `own` (n,) are weights
        of own models.
        """
        if recipe == MIX:
            found: np.ndarray = np.mean(
                [each[Recipe(number, 0, "")] for number in self.boxes()], axis=0
            )
            return found
        if recipe in each:
            return each[recipe]
        joint, alone = each[replace(recipe, mode=JOINT)], each[replace(recipe, mode=OWN)]
        w = own[:, None] if recipe.mode == PERSONAL else 0.5
        mixed: np.ndarray = (1 - w) * joint + w * alone
        return mixed

    def label(self, recipe: Recipe) -> str:
        """Its name in reports, such as "fedavg-ft (own heads), fine-tuned"."""
        if recipe == MIX:
            return f"mean of {', '.join(self.candidates[number].label for number in self.boxes())}"
        mode = recipe.mode
        if replace(recipe, mode=JOINT) in self.first:
            mode = {JOINT: "", "": HALF}.get(mode, mode)
        return f"{self.candidates[recipe.candidate].label}{f', {mode}' if mode else ''}"

    def counts(self) -> dict[str, int]:
        """How often each recipe was chosen, in folds of all repeats."""
        return dict(
            Counter(self.label(recipe) for of_repeat in self.choices for recipe in of_repeat)
        )
