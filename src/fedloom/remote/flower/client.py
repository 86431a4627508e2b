"""The ClientApp: answers a SuperNode's calls, by the node's own config and beside its own data.

Flower starts a process for each message, so all state is in the folder of the node's
`fedloom.remote.node.service.NodeService`, which processes lock. Exceptions are caught here, as
Flower would send their texts to the SuperLink.
"""

import logging
from pathlib import Path
from typing import Any

from flwr.app import Message
from flwr.clientapp import ClientApp

app = ClientApp()


def answer(message: Any, context: Any) -> Any:
    """Answer one call of the ServerApp; never raises."""
    from fedloom.remote import rpc_errors
    from fedloom.remote.flower.records import pack
    from fedloom.remote.rpc_errors import CallRefused

    try:
        content = pack({"code": "", "words": ""}, _answered(message.content, context.node_config))
    except CallRefused as refusal:
        logging.getLogger("fedloom.node").warning("refused: %s. %s", refusal.words, refusal.detail)
        content = pack({"code": refusal.code, "words": refusal.words})
    except Exception:
        logging.getLogger("fedloom.node").exception("a call failed")
        content = pack(
            {
                "code": rpc_errors.FAILED,
                "words": "this node failed to answer; the reason is in its log",
            }
        )
    return Message(content, reply_to=message)


app.query("fedloom")(answer)


def _answered(content: Any, node_config: Any) -> bytes:
    """The answer of the SuperNode's node service."""
    import asyncio

    from fedloom.remote import rpc_errors
    from fedloom.remote.flower.records import CALLER, unpack
    from fedloom.remote.node.config import read
    from fedloom.remote.node.service import NodeService
    from fedloom.remote.node.store import lock_folder
    from fedloom.remote.rpc_errors import CallRefused, mismatch

    if not isinstance(node_config.get("fedloom"), str):
        raise CallRefused(
            rpc_errors.FAILED,
            "this SuperNode needs the path of its node.toml as the setting fedloom of "
            "--node-config",
        )
    config = read(Path(node_config["fedloom"]))
    (kind, to), body = unpack(content, "kind", "to")
    if to != config.name:
        raise mismatch(
            f"this node is {config.name}, not {to}: check the name that its SuperNode is "
            "registered with"
        )

    async def ask() -> bytes:
        # Flower has the keys
        host = NodeService(config.model_copy(update={"insecure": True}), certified=False)
        try:
            if len(body) > config.max_message_mb << 20:
                raise CallRefused(
                    rpc_errors.TOO_LARGE,
                    f"the call has {len(body)} bytes; the limit is {config.max_message_mb} MB",
                )
            return await host.answer(CALLER, kind, body)
        finally:
            await host.close()

    with lock_folder(config.state, wait=True):
        return asyncio.run(ask())
