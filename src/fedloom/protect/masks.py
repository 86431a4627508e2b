"""Secure sums: a coordinator that follows the protocol learns the sum of the vectors of n parties
that were asked the same, and no single one.

Paper: K. Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning",
CCS 2017, with its consistency check (Figure 4), among parties that can check each other's
signatures. Every cipher is that of
`cryptography`: X25519, HKDF-SHA256, ChaCha20, AES-GCM. Only Shamir's polynomial is computed here,
    with whole numbers.

    keys     i sends fresh public keys, signed
    shares   i gets the list L of all keys, checks it, and sends shares of its two secrets, sealed for each j
    mask     i sends y_i = x_i + PRG(b_i) + sum_{j > i} PRG(s_ij) - sum_{j < i} PRG(s_ij)   modulo 2^64
    agree    i gets the set U of those whose y arrived, and signs it, once
    open     i gets the signatures, and sends for each j in U its share of b_j, for others its share of j's mask key

The coordinator needs `threshold(n)` parties to the end. Up to n - threshold(n) may be lost at any
step.

A sum that counts only if all n parties are in it needs no shares, since nobody's masks ever have to
be replaced:

    keys     as above
    list     i gets the list L of all keys, and checks it
    mask     i sends y_i = x_i + sum_{j > i} PRG(s_ij) - sum_{j < i} PRG(s_ij)   modulo 2^64

The sum of all y_i is that of all x_i. If one is missing, its pairwise masks hide the rest, and no
secret is opened.

Guarantees: for each j either b_j or j's mask key becomes known, never both, so a y that is late
stays sealed. Honest parties sign one U; since more than two thirds sign, a coordinator that shows
two sets U to two groups finds too few signatures for one of them, unless more than a third of the
parties help it, or more than the `colluders` that the
threshold allows for. Not protected: the sum itself, and the difference of two sums over different
parties.

Pairwise masks and signatures depend on what a party was asked (`question`), so they cancel only
among parties that were asked the same. Otherwise a coordinator could give all parties but one
inputs whose results it knows (D. Pasquini, D. Francati, G. Ateniese, "Eluding Secure Aggregation in
Federated Learning via Model Inconsistency", CCS 2022). It can still give all of them one model
whose sum holds rows, or to which all but one have nothing to add, and open them with different
configs, which are not in the hash (docs/security-advisories.md, N1 and N2).
"""  # noqa: E501

import hashlib
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedloom.core.errors import MessageError
from fedloom.core.fixed_point import LEAST, threshold
from fedloom.core.message import Tree, digest

PRIME: Final = 2**256 + 297
"""The smallest prime above 2^256, so that every secret of 32 bytes is below it."""
SHARE: Final = 33
"""Bytes of a share."""
_NONCE: Final = bytes(12)  # each AES key seals one message


@dataclass(frozen=True)
class Keys:
    """A party's public keys of one sum.

    Attributes:
        mask: for masks, 32 bytes.
        seal: for sealed shares, 32 bytes.
        signature: of both, the party's name and the sum's name.
    """

    mask: bytes
    seal: bytes
    signature: bytes


class SumMember:
    """One party in one sum. Each step may be taken once, in the order of the methods.

    Args:
        name: the party's own.
        sum_name: of the sum, unique: runs and calls are part of it.
        sign: signs bytes with the party's long-term key.
        verify: whether a signature of some bytes is that of a name.
        colluders: see `threshold`.
    """

    def __init__(
        self,
        name: str,
        sum_name: bytes,
        sign: Callable[[bytes], bytes],
        verify: Callable[[str, bytes, bytes], bool],
        colluders: int = 0,
    ) -> None:
        self.name, self._sum, self._colluders = name, sum_name, colluders
        self._sign, self._verify = sign, verify
        self._mask_key, self._seal_key = X25519PrivateKey.generate(), X25519PrivateKey.generate()
        self._own = secrets.token_bytes(32)  # b_i
        self._listed: dict[str, Keys] = {}
        self._shares: dict[str, tuple[int, int]] = {}
        self._agreed, self._asked = b"", b""
        self._step = 0
        self._whole = False

    def keys(self) -> Keys:
        """Fresh public keys, signed."""
        self._next(1)
        mask, seal = (
            key.public_key().public_bytes_raw() for key in (self._mask_key, self._seal_key)
        )
        return Keys(mask, seal, self._sign(_keys_text(self._sum, self.name, mask, seal)))

    def shares(self, listed: Mapping[str, Keys]) -> dict[str, bytes]:
        """Sealed shares of b_i and of the mask key, for each other party.

        Raises:
            MessageError: the list is too short, lacks this party's own keys, or has a key twice or
                one that is not signed by its owner.
        """
        self._next(2)
        self._check(listed)
        n, places = len(listed), _places(listed)
        parts = [
            shamir(secret, n, self._least)
            for secret in (self._own, self._mask_key.private_bytes_raw())
        ]
        at = places[self.name] - 1
        self._shares[self.name] = parts[0][at], parts[1][at]
        sealed = {}
        for name, place in places.items():
            if name != self.name:
                plain = b"".join(part[place - 1].to_bytes(SHARE, "big") for part in parts)
                key = self._seal_with(name, self.name, name)
                sealed[name] = AESGCM(key).encrypt(_NONCE, plain, self._sum)
        return sealed

    def list_all(self, listed: Mapping[str, Keys]) -> None:
        """Take the list of a sum that all its parties must be in, so that there are no shares.

        Raises:
            MessageError: as in `shares`.
        """
        self._next(2)
        self._check(listed)
        self._whole = True

    def _check(self, listed: Mapping[str, Keys]) -> None:
        mine = (
            self._mask_key.public_key().public_bytes_raw(),
            self._seal_key.public_key().public_bytes_raw(),
        )
        own = listed.get(self.name)
        if own is None or (own.mask, own.seal) != mine:
            raise MessageError("the list of a sum must have this party's own keys")
        if len(listed) < LEAST:
            raise MessageError(f"a secure sum needs at least {LEAST} parties, not {len(listed)}")
        public = [key for keys in listed.values() for key in (keys.mask, keys.seal)]
        if len({*public}) < len(public):
            raise MessageError("the keys of a sum must be distinct")
        for name, keys in listed.items():
            if not self._verify(
                name, _keys_text(self._sum, name, keys.mask, keys.seal), keys.signature
            ):
                raise MessageError(f"the keys of {name!a} are not signed by it")
        if threshold(len(listed), self._colluders) > len(listed):
            raise MessageError(
                f"{len(listed)} parties are too few for a secure sum with {self._colluders} "
                "colluders"
            )
        self._listed = dict(listed)

    @property
    def _least(self) -> int:
        return threshold(len(self._listed), self._colluders)

    @property
    def names(self) -> list[str]:
        """The names in the list of the sum, sorted."""
        return sorted(self._listed)

    def mask(self, x: np.ndarray, asked: bytes, sealed: Mapping[str, bytes]) -> np.ndarray:
        """The masked vector y (d,) uint64 of x (d,) uint64.

        Args:
            x: this party's vector.
            asked: the `question` that x answers.
            sealed: the shares that the others sealed for this party. These others take part; the
                rest of the list is already lost.

        Raises:
            MessageError: too few others take part, or a share was altered.
        """
        self._next(3)
        if self._whole:
            raise MessageError("a sum of all parties has no shares")
        if self.name in sealed or not sealed.keys() <= self._listed.keys():
            raise MessageError("shares must come from other parties of the list")
        if len(sealed) + 1 < self._least:
            raise MessageError(
                f"{len(sealed) + 1} of {len(self._listed)} parties are too few for a secure sum"
            )
        for name, box in sealed.items():
            try:
                plain = AESGCM(self._seal_with(name, name, self.name)).decrypt(
                    _NONCE, box, self._sum
                )
            except InvalidTag:
                raise MessageError(f"the share of {name!a} was altered") from None
            self._shares[name] = (
                int.from_bytes(plain[:SHARE], "big"),
                int.from_bytes(plain[SHARE:], "big"),
            )
        self._asked = asked
        y: np.ndarray = (
            x + keystream(self._own, len(x)) + self._pairwise(sealed, b"mask", len(x), asked)
        )
        return y

    def mask_all(self, x: np.ndarray, asked: bytes) -> np.ndarray:
        """The masked vector y (d,) uint64 of x (d,) uint64 in a sum of all parties of the list: the
        last step.

        Args:
            x: this party's vector.
            asked: the `question` that x answers.
        """
        self._next(3)
        if not self._whole:
            raise MessageError("this sum has shares: its parties may be lost")
        self._step = 5
        y: np.ndarray = x + self._pairwise(
            self._listed.keys() - {self.name}, b"mask of all", len(x), asked
        )
        return y

    def _pairwise(
        self, others: Collection[str], purpose: bytes, d: int, asked: bytes
    ) -> np.ndarray:
        """The masks (d,) that cancel those of the others."""
        total = np.zeros(d, np.uint64)
        for name in others:
            pairwise = keystream(
                _pair_seed(self._mask_key, self._listed[name].mask, self._sum, asked, purpose), d
            )
            total = total + pairwise if name > self.name else total - pairwise
        return total

    def agree(self, arrived: Collection[str]) -> bytes:
        """The signature of the set U of those whose masked vector arrived.

        Raises:
            MessageError: U is too small, lacks this party, or names one that does not take part.
        """
        self._next(4)
        if self.name not in arrived or not {*arrived} <= self._shares.keys():
            raise MessageError(
                "the set of a sum must have this party, and no party outside the sum"
            )
        if len({*arrived}) < self._least:
            raise MessageError(
                f"{len({*arrived})} of {len(self._listed)} parties are too few for a secure sum"
            )
        self._agreed = _set_text(self._sum, self._asked, arrived)
        self._arrived = {*arrived}
        return self._sign(self._agreed)

    def open(self, signatures: Mapping[str, bytes]) -> dict[str, bytes]:
        """This party's share, by party: of b_j for j in U, of the mask key for any other that took
        part.

        Raises:
            MessageError: too few members of U have signed this U, or a signature is not that of its
                name.
        """
        self._next(5)
        if not signatures.keys() <= self._arrived or len(signatures) < self._least:
            raise MessageError("too few members have signed the set of this sum")
        if wrong := [
            name for name, sent in signatures.items() if not self._verify(name, self._agreed, sent)
        ]:
            raise MessageError(
                f"{wrong[0]!a} has not signed this set: the coordinator may have shown or asked "
                "it another"
            )
        return {
            name: (own if name in self._arrived else key).to_bytes(SHARE, "big")
            for name, (own, key) in self._shares.items()
        }

    def _next(self, step: int) -> None:
        """Take the next step, which cannot be repeated: other arguments could open more than one
        sum.
        """
        if step != self._step + 1:
            raise MessageError("the steps of a secure sum must come once each, in order")
        self._step = step

    def _seal_with(self, other: str, sender: str, receiver: str) -> bytes:
        names = _joined(sender.encode(), receiver.encode())
        return _derived(self._seal_key, self._listed[other].seal, b"shares", self._sum, names)


def question(
    round: int,
    method: str,
    weight: str,
    expect: Tree,
    names: Collection[str],
    shared: Tree,
    past: str = "",
) -> bytes:
    """The hash of what the parties of a sum are asked: 32 bytes.

    Args:
        round, method: of the call.
        weight: the name of the weight in a reply, or "".
        expect: the template of a reply.
        names: of all parties in the list of the sum.
        shared: the arguments, as parties decode them.
        past: the hash of what the parties were asked before: parties that were steered apart have
            no sum.
    """
    facts: dict[str, Tree] = {
        "round": round,
        "method": method,
        "weight": weight,
        "expect": expect,
        "shared": shared,
    }
    return bytes.fromhex(digest({**facts, "names": sorted(names), "past": past}))


def unmasked(
    listed: Mapping[str, Keys],
    shared: Collection[str],
    masked: Mapping[str, np.ndarray],
    opened: Mapping[str, Mapping[str, bytes]],
    sum_name: bytes,
    asked: bytes,
    colluders: int = 0,
) -> np.ndarray:
    """The sum (d,) uint64 of the vectors of all parties whose masked vector arrived.

    Args:
        listed: the list L of all keys.
        shared: those that took part in the masks.
        masked: the masked vectors that arrived, by party: U.
        opened: what each party opened.
        sum_name: of the sum.
        asked: the `question` that the vectors answer.
        colluders: see `threshold`.

    Raises:
        MessageError: too few parties opened their shares, or a share is wrong.
    """
    t, places = threshold(len(listed), colluders), _places(listed)
    helpers = sorted(opened, key=places.__getitem__)[:t]
    if len(helpers) < t:
        raise MessageError(
            f"{len(helpers)} of {len(listed)} parties stayed to the end; a sum needs {t}"
        )
    if any({*opened[name]} != {*shared} for name in helpers):
        raise MessageError("a party opened shares that were not requested")
    weights = _lagrange([places[name] for name in helpers])

    def secret(name: str) -> bytes:
        parts = [int.from_bytes(opened[helper][name], "big") for helper in helpers]
        value = sum(w * part for w, part in zip(weights, parts, strict=True)) % PRIME
        if value >= 2**256:
            raise MessageError(f"the shares for {name!a} are inconsistent")
        return value.to_bytes(32, "big")

    total: np.ndarray = np.add.reduce([*masked.values()], dtype=np.uint64)
    for name in masked:
        total -= keystream(secret(name), len(total))
    for lost in {*shared} - masked.keys():
        key = X25519PrivateKey.from_private_bytes(secret(lost))
        if key.public_key().public_bytes_raw() != listed[lost].mask:
            raise MessageError(f"the shares for {lost!a} do not fit its key")
        for name in masked:
            pairwise = keystream(_pair_seed(key, listed[name].mask, sum_name, asked), len(total))
            total = total - pairwise if lost > name else total + pairwise
    return total


def keystream(seed: bytes, d: int) -> np.ndarray:
    """PRG(seed): d numbers modulo 2^64 from ChaCha20."""
    stream = Cipher(ChaCha20(seed, bytes(16)), mode=None).encryptor().update(bytes(8 * d))
    return np.frombuffer(stream, dtype="<u8").astype(np.uint64, copy=False)


def shamir(secret: bytes, n: int, t: int) -> list[int]:
    """Shares 1..n of 32 bytes: values of a random polynomial of degree t - 1 modulo `PRIME`. Any t
    of them give the secret; fewer say nothing.
    """
    polynomial = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(t - 1))]
    shares = []
    for x in range(1, n + 1):
        value = 0
        for coefficient in reversed(polynomial):
            value = (value * x + coefficient) % PRIME
        shares.append(value)
    return shares


def _lagrange(xs: Sequence[int]) -> list[int]:
    """The weights with which the values at xs give that at 0."""
    weights = []
    for x in xs:
        above = below = 1
        for other in xs:
            if other != x:
                above, below = above * other % PRIME, below * (other - x) % PRIME
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return weights


def _pair_seed(
    key: X25519PrivateKey, other: bytes, sum_name: bytes, asked: bytes, purpose: bytes = b"mask"
) -> bytes:
    return _derived(key, other, purpose, sum_name, asked)


def _derived(
    key: X25519PrivateKey, other: bytes, purpose: bytes, sum_name: bytes, more: bytes
) -> bytes:
    """32 bytes that only the two owners of these keys can compute; both keys are part of them, in
    one order.
    """
    try:
        secret = key.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError:  # a key of low order gives zeros
        raise MessageError("a key of a sum is invalid") from None
    both = b"".join(sorted((key.public_key().public_bytes_raw(), other)))
    return HKDF(
        SHA256(), 32, salt=None, info=_joined(b"fedloom", purpose, sum_name, both, more)
    ).derive(secret)


def _places(names: Collection[str]) -> dict[str, int]:
    """The number of each party's share, from 1."""
    return {name: place for place, name in enumerate(sorted(names), 1)}


def _keys_text(sum_name: bytes, name: str, mask: bytes, seal: bytes) -> bytes:
    return _joined(b"fedloom keys", sum_name, name.encode(), mask, seal)


def _set_text(sum_name: bytes, asked: bytes, arrived: Collection[str]) -> bytes:
    names = _joined(*(name.encode() for name in sorted({*arrived})))
    return _joined(b"fedloom set", sum_name, asked, hashlib.sha256(names).digest())


def _joined(*parts: bytes) -> bytes:
    """Parts that no other parts give."""
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)
