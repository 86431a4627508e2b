"""The names that method pages are written with, in one module: `from fedloom.core.page import
Method, Party, …`.
"""

from fedloom.core.aggregate import Aggregator, Combined, Kinds
from fedloom.core.black_box import BlackBoxModel, CrossFit
from fedloom.core.context import BATCH_CACHE, ClientContext, aligned_plan, epoch_plan, sample_plan
from fedloom.core.errors import ConfigError, MessageError, MethodError, ModelError, NotReady
from fedloom.core.federation import Federation
from fedloom.core.local import EVERY_LOCAL, LOCAL_STEPS, LocalSetting
from fedloom.core.losses import cap_rows, kl, kl_gradient, reverse_kl_gradient
from fedloom.core.message import (
    Shape,
    Template,
    Tree,
    check_finite,
    floats,
    map_tensors,
    weighted_mean,
)
from fedloom.core.method import Guarantee, Method, MethodConfig
from fedloom.core.network import Network
from fedloom.core.optim import SGD, Adam, Optimizer, Rate
from fedloom.core.party import LearnedTable, Party
from fedloom.core.task import EVERY_TASK, Classes, Number, Task

__all__ = [
    "BATCH_CACHE",
    "EVERY_LOCAL",
    "EVERY_TASK",
    "LOCAL_STEPS",
    "SGD",
    "Adam",
    "Aggregator",
    "BlackBoxModel",
    "Classes",
    "ClientContext",
    "Combined",
    "ConfigError",
    "CrossFit",
    "Federation",
    "Guarantee",
    "Kinds",
    "LearnedTable",
    "LocalSetting",
    "MessageError",
    "Method",
    "MethodConfig",
    "MethodError",
    "ModelError",
    "Network",
    "NotReady",
    "Number",
    "Optimizer",
    "Party",
    "Rate",
    "Shape",
    "Task",
    "Template",
    "Tree",
    "aligned_plan",
    "cap_rows",
    "check_finite",
    "epoch_plan",
    "floats",
    "kl",
    "kl_gradient",
    "map_tensors",
    "reverse_kl_gradient",
    "sample_plan",
    "weighted_mean",
]
