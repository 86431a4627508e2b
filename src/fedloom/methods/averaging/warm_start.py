"""A start of training from the server's pretrained model, for FedLP."""

from collections.abc import Mapping

from torch import Tensor, nn

from fedloom.core.page import ModelError


def matching(
    expected: Mapping[str, Tensor], pretrained: dict[str, nn.Parameter]
) -> dict[str, nn.Parameter]:
    """The pretrained weights, if they have the names and shapes of `expected`.

    Raises:
        ModelError: they differ.
    """
    wrong = [k for k in {**expected, **pretrained} if k not in expected or k not in pretrained]
    wrong += [k for k in expected if k not in wrong and expected[k].shape != pretrained[k].shape]
    if wrong:
        raise ModelError(
            "params.warm_start needs a pretrained model of the clients' architecture, but "
            f"{wrong[0]!r} differs: set pretrained.model to the network in models.pool, with the "
            "same norm"
        )
    return pretrained
