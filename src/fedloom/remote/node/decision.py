"""A decision of a site, as it is stored and signed."""

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict

What = Literal["approve", "stop", "audit"]
AUDIT: Final = "audit"
"""In place of a run's id, for a decision about the audit log."""


class RunDecision(BaseModel):
    """A site's decision about a run.

    Attributes:
        run: its id, or `AUDIT`.
        what: to approve or to stop it, or to confirm the audit log.
        sha256: of the text that was shown, or of the newest line of the audit log.
        time: in UTC.
        by: the name in the certificate; "" without one.
        certificate: in PEM.
        signature: of the other fields, in hexadecimal digits.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str
    what: What
    sha256: str
    time: str
    by: str = ""
    certificate: str = ""
    signature: str = ""

    @property
    def signed(self) -> bytes:
        """The text that is signed."""
        return b"fedloom decision " + self.model_dump_json(exclude={"signature"}).encode()
