"""Use after training: a run exported to one self-contained folder for each model.

from fedloom.deploy import export, load_active, load_model, load_party

export("runs/rows", "models")                             # client-0, client-1, …, server: plain PyTorch opens them
load_model("models/server").predict("rows.csv")           # (n, K)
push("models/server", "owner/name")                       # to the Hugging Face hub; pull("owner/name") loads it

export("runs/mine", "parties")                            # party-0, party-1, …, active: one for each owner
party = load_party("parties/party-1")
second = party.embed("rows.csv", ids)                     # (n, d), for the active party
party.predict_alone("rows.csv")                           # (n, Z), where the method has prototypes
active = load_active("parties/active")
active.predict([first, second])                           # (n, Z)
"""  # noqa: E501

from fedloom.deploy.deployed import DeployedActive, DeployedParty, load_active, load_party
from fedloom.deploy.embeddings import Embeddings, read_embeddings, write_embeddings
from fedloom.deploy.export import Exported, export
from fedloom.deploy.hub import pull, push
from fedloom.deploy.models import DeployedModel, load_model

__all__ = [
    "DeployedActive",
    "DeployedModel",
    "DeployedParty",
    "Embeddings",
    "Exported",
    "export",
    "load_active",
    "load_model",
    "load_party",
    "pull",
    "push",
    "read_embeddings",
    "write_embeddings",
]
