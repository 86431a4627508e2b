"""Use after training: a vertical run exported to one self-contained folder for each party.

from fedloom.deploy import export, load_active, load_party

export("runs/mine", "parties")                            # party-0, party-1, …, active: one for each owner
party = load_party("parties/party-1")
party.embed("rows.csv")                                   # (n, d), for the active party
party.predict_alone("rows.csv")                           # (n, Z), where the method has prototypes
active = load_active("parties/active")
active.predict({0: first, 1: second})                     # (n, Z)
"""

from fedloom.deploy.deployed import DeployedActive, DeployedParty, load_active, load_party
from fedloom.deploy.embeddings import Embeddings, read_embeddings, write_embeddings
from fedloom.deploy.export import Exported, export

__all__ = [
    "DeployedActive",
    "DeployedParty",
    "Embeddings",
    "Exported",
    "export",
    "load_active",
    "load_party",
    "read_embeddings",
    "write_embeddings",
]
