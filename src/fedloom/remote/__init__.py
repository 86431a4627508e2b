"""Between organizations: parties on machines that do not trust each other, over gRPC with mutual
TLS (extra `net`).
"""

import os
from importlib.util import find_spec

from fedloom.core.errors import EngineError

if not (find_spec("grpc") and find_spec("cryptography")):
    raise EngineError(
        "runs between organizations need gRPC and cryptography: pip install -e '.[net]'"
    )
# gRPC's core writes to stderr; its errors are raised as well
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
