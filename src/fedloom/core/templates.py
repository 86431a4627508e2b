"""Templates of replies as trees of plain values, to send them to another process or machine."""

from typing import Any, Final

from torch import Tensor

from fedloom.core.errors import MessageError
from fedloom.core.message import Shape, Template

_TYPES: Final = {kind.__name__: kind for kind in (int, float, bool, str, object)}


def spell(template: Template) -> Any:
    """A template as a tree that can be sent in a message."""
    if template is None:
        return None
    if isinstance(template, dict):
        return {"keys": {key: spell(child) for key, child in template.items()}}
    if isinstance(template, list | tuple):
        return {"items": [spell(child) for child in template]}
    if isinstance(template, Tensor | Shape):
        dims = template.shape if isinstance(template, Tensor) else template.dims
        return {"dtype": str(template.dtype).removeprefix("torch."), "dims": list(dims)}
    if isinstance(template, type) and template.__name__ in _TYPES:
        return {"type": template.__name__}
    raise MessageError(f"a template holds tensors, Shapes, types and None, not {template!r:.80}")


def unspell(tree: Any) -> Template:
    """The template of a tree that `spell` returned."""
    if tree is None:
        return None
    if "keys" in tree:
        return {key: unspell(child) for key, child in tree["keys"].items()}
    if "items" in tree:
        return [unspell(child) for child in tree["items"]]
    return _TYPES[tree["type"]] if "type" in tree else Shape(tree["dtype"], *tree["dims"])
