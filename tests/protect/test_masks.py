"""Secure sums: masks cancel, whoever is lost; the coordinator's view says nothing more; who lies is
refused.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from itertools import combinations

import numpy as np
import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedloom.core.errors import MessageError
from fedloom.core.fixed_point import threshold
from fedloom.protect import masks
from fedloom.protect.masks import Keys, SumMember, keystream, shamir, unmasked

SUM, ASKED = b"run 1, call 7", bytes(32)
D = 40


class Sum:
    """n members and an honest coordinator; a test takes the steps that it needs."""

    def __init__(self, n: int, seed: int = 0, colluders: int = 0) -> None:
        self.colluders = colluders
        self.names = [f"node-{k:02}" for k in range(n)]
        self.signers = {name: Ed25519PrivateKey.generate() for name in self.names}
        self.x = dict(
            zip(
                self.names,
                np.random.default_rng(seed).integers(0, 2**64, (n, D), np.uint64),
                strict=True,
            )
        )
        self.members = {name: self.member(name) for name in self.names}
        self.listed: dict[str, Keys] = {}
        self.sealed: dict[str, dict[str, bytes]] = {}
        self.masked: dict[str, np.ndarray] = {}

    def member(self, name: str, sum_name: bytes = SUM) -> SumMember:
        return SumMember(name, sum_name, self.signers[name].sign, self.verify, self.colluders)

    def verify(self, name: str, text: bytes, signature: bytes) -> bool:
        try:
            self.signers[name].public_key().verify(signature, text)
        except (InvalidSignature, KeyError):
            return False
        return True

    def keys(self, lost: Collection[str] = ()) -> None:
        self.listed = {name: self.members[name].keys() for name in self.names if name not in lost}

    def shares(self, lost: Collection[str] = ()) -> None:
        self.sealed = {
            name: self.members[name].shares(self.listed) for name in self.listed if name not in lost
        }

    def for_one(self, name: str) -> dict[str, bytes]:
        return {other: boxes[name] for other, boxes in self.sealed.items() if other != name}

    def mask(self, lost: Collection[str] = ()) -> None:
        self.masked = {
            name: self.members[name].mask(self.x[name], ASKED, self.for_one(name))
            for name in self.sealed
            if name not in lost
        }

    def signatures(self, lost: Collection[str] = ()) -> dict[str, bytes]:
        return {
            name: self.members[name].agree(self.masked) for name in self.masked if name not in lost
        }

    def opened(
        self, signatures: Mapping[str, bytes], lost: Collection[str] = ()
    ) -> dict[str, dict[str, bytes]]:
        return {
            name: self.members[name].open(signatures) for name in signatures if name not in lost
        }

    def total(self, opened: Mapping[str, Mapping[str, bytes]]) -> np.ndarray:
        return unmasked(self.listed, self.sealed, self.masked, opened, SUM, ASKED, self.colluders)

    def plain(self) -> np.ndarray:
        return np.stack([self.x[name] for name in self.masked]).sum(0, dtype=np.uint64)


def run(n: int, lost: Mapping[str, Collection[str]]) -> tuple[np.ndarray, np.ndarray]:
    """The sum by the protocol and the plain one, with members lost before each of the steps."""
    s = Sum(n)
    gone: set[str] = set()

    def without(step: str) -> set[str]:
        gone.update(lost.get(step, ()))
        return gone

    s.keys(without("keys"))
    s.shares(without("shares"))
    s.mask(without("mask"))
    signatures = s.signatures(without("agree"))
    return s.total(s.opened(signatures, without("open"))), s.plain()


@pytest.mark.parametrize("n", [3, 4, 7, 12])
def test_masks_cancel(n: int) -> None:
    found, plain = run(n, {})
    assert np.array_equal(found, plain)


@pytest.mark.parametrize("step", ["keys", "shares", "mask", "agree", "open"])
def test_who_is_lost_at_any_step_only_leaves_the_sum(step: str) -> None:
    n = 7
    most = n - threshold(n)
    for lost in combinations([f"node-{k:02}" for k in (0, 3, 6)], most):
        found, plain = run(n, {step: lost})
        assert np.array_equal(found, plain)


def test_losses_at_several_steps() -> None:
    found, plain = run(
        13, {"keys": ["node-01"], "shares": ["node-09"], "mask": ["node-04"], "open": ["node-00"]}
    )
    assert np.array_equal(found, plain)


@pytest.mark.parametrize("step", ["mask", "agree", "open"])
def test_below_the_threshold_there_is_no_sum(step: str) -> None:
    n = 7
    lost = [f"node-{k:02}" for k in range(n - threshold(n) + 1)]
    with pytest.raises(MessageError, match=r"too few|stayed to the end"):
        run(n, {step: lost})
    with pytest.raises(MessageError, match="at least 3"):
        run(2, {})
    with pytest.raises(MessageError, match="too few"):
        run(n, {"shares": lost})


def test_what_arrives_is_uniform_whatever_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chi-square over bytes with fixed seeds, 255 degrees of freedom: mean 255, standard deviation
    22.6.
    """
    draw = np.random.default_rng(5)
    monkeypatch.setattr(secrets, "token_bytes", lambda n: draw.bytes(n))

    def chi_square(values: np.ndarray) -> float:
        counts = np.bincount(np.ascontiguousarray(values).view(np.uint8), minlength=256)
        expected = counts.sum() / 256
        return float(((counts - expected) ** 2 / expected).sum())

    s = Sum(4)
    s.x = {name: np.full(20_000, 7, np.uint64) for name in s.names}  # as far from uniform as can be
    s.keys(), s.shares(), s.mask()
    assert chi_square(s.x["node-00"]) > 1e6
    assert all(chi_square(y) < 255 + 5 * 22.6 for y in s.masked.values())
    assert chi_square(s.masked["node-00"] - s.masked["node-01"]) < 255 + 5 * 22.6


def test_a_late_vector_stays_sealed_after_the_others_gave_its_mask_key() -> None:
    """The coordinator knows the pairwise masks of a lost party, and its vector arrives after all: b
    is unknown.
    """
    s = Sum(4)
    s.keys(), s.shares(), s.mask()
    late = s.masked.pop("node-03")
    opened = s.opened(s.signatures())
    assert np.array_equal(s.total(opened), s.plain())
    # of the mask key, not of b
    shares = {name: int.from_bytes(opened[name]["node-03"], "big") for name in opened}
    weights = masks._lagrange([1, 2, 3])
    found = sum(w * share for w, share in zip(weights, shares.values(), strict=True)) % masks.PRIME
    member = s.members["node-03"]
    assert found == int.from_bytes(member._mask_key.private_bytes_raw(), "big")
    assert found != int.from_bytes(member._own, "big")
    known = sum(
        keystream(masks._pair_seed(member._mask_key, s.listed[name].mask, SUM, ASKED), D)
        for name in s.masked
    )  # all that it can take off
    assert np.array_equal(late - s.x["node-03"] + known, keystream(member._own, D))


def test_a_coordinator_that_shows_two_sets_gets_neither() -> None:
    s = Sum(7)
    s.keys(), s.shares(), s.mask()
    with_it, without = s.names, s.names[:6]
    told = {
        name: s.members[name].agree(with_it if name in s.names[4:] else without) for name in s.names
    }
    for name in s.names[:6]:
        theirs = with_it if name in s.names[4:] else without
        with pytest.raises(MessageError, match=r"too few members|has not signed this set"):
            s.members[name].open({n: told[n] for n in theirs})
    alone = {n: told[n] for n in s.names[:4]}
    with pytest.raises(MessageError, match="steps of a secure sum must come once"):
        s.members["node-00"].open(alone)


def test_a_step_comes_once() -> None:
    s = Sum(3)
    s.keys(), s.shares(), s.mask()
    with pytest.raises(MessageError, match="once"):
        s.members["node-00"].mask(s.x["node-00"], ASKED, s.for_one("node-00"))
    s.members["node-01"].agree(s.names)
    with pytest.raises(MessageError, match="once"):
        s.members["node-01"].agree(s.names[:2])


def test_lists_that_are_not_what_they_claim_are_refused() -> None:
    def refused(change: Mapping[str, Keys], match: str) -> None:
        s = Sum(4)
        s.keys()
        made = {**s.listed, **{name: keys for name, keys in change.items() if keys is not None}}
        with pytest.raises(MessageError, match=match):
            s.members["node-00"].shares(made)

    other = Sum(4)
    other.keys()
    refused({"node-01": other.listed["node-01"]}, "not signed")  # another signer under this name
    refused({"node-00": other.listed["node-00"]}, "own keys")
    s = Sum(4)
    s.keys()
    earlier = s.member("node-01", b"run 1, call 6").keys()
    with pytest.raises(MessageError, match="not signed"):  # replayed from another sum
        s.members["node-00"].shares({**s.listed, "node-01": earlier})
    s = Sum(4)
    s.keys()
    with pytest.raises(MessageError, match="must be distinct"):  # own keys reflected
        s.members["node-00"].shares({**s.listed, "node-01": s.listed["node-00"]})
    s = Sum(4)
    s.keys()
    low = bytes(range(32)), bytes(32)  # a key of low order: the shared secret would be zeros
    signed = s.signers["node-01"].sign(masks._keys_text(SUM, "node-01", *low))
    with pytest.raises(MessageError, match="invalid"):
        s.members["node-00"].shares({**s.listed, "node-01": Keys(*low, signed)})


def test_shares_cannot_be_altered_or_moved() -> None:
    s = Sum(4)
    s.keys(), s.shares()
    boxes = s.for_one("node-00")
    with pytest.raises(MessageError, match="altered"):
        s.members["node-00"].mask(s.x["node-00"], ASKED, {**boxes, "node-01": boxes["node-02"]})
    with pytest.raises(MessageError, match="altered"):
        s.members["node-01"].mask(
            s.x["node-01"], ASKED, {**s.for_one("node-01"), "node-00": bytes(82)}
        )


def test_shamir() -> None:
    secret = bytes(range(32))
    shares = shamir(secret, 5, 3)
    for xs in combinations(range(1, 6), 3):
        weights = masks._lagrange(xs)
        value = sum(w * shares[x - 1] for w, x in zip(weights, xs, strict=True)) % masks.PRIME
        assert value.to_bytes(32, "big") == secret
    # Fermat
    assert all(pow(base, masks.PRIME - 1, masks.PRIME) == 1 for base in (2, 3, 5, 7, 11, 13))


def test_the_keystream_is_rfc_8439s() -> None:
    """Its appendix A.1, test vector 1: key and nonce of zeros, counter 0."""
    begin = bytes.fromhex("76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7")
    assert keystream(bytes(32), 4).astype("<u8").tobytes() == begin


def test_a_sum_of_all_parties_has_no_shares_and_without_one_of_them_no_sum() -> None:
    s = Sum(5)
    s.keys()
    for member in s.members.values():
        member.list_all(s.listed)
    s.masked = {name: member.mask_all(s.x[name], ASKED) for name, member in s.members.items()}
    vectors = [*s.masked.values()]
    assert np.array_equal(np.stack(vectors).sum(0, dtype=np.uint64), s.plain())
    rest = np.stack(vectors[1:]).sum(0, dtype=np.uint64)
    truth = np.stack([*s.x.values()][1:]).sum(0, dtype=np.uint64)
    assert not (rest == truth).any() and not any(
        (y == x).any() for y, x in zip(vectors, s.x.values(), strict=True)
    )
    for member in s.members.values():  # nothing is left to open
        with pytest.raises(MessageError, match="once each"):
            member.agree(s.masked)


def test_in_a_sum_of_all_parties_other_questions_lists_and_steps_have_no_sum() -> None:
    s = Sum(4)
    s.keys()
    asked = dict(zip(s.names, [ASKED, ASKED, ASKED, bytes(31) + b"1"], strict=True))
    for name, member in s.members.items():
        member.list_all(s.listed)
        s.masked[name] = member.mask_all(s.x[name], asked[name])
    assert not (np.stack([*s.masked.values()]).sum(0, dtype=np.uint64) == s.plain()).any()
    s = Sum(4)
    s.keys()
    with pytest.raises(MessageError, match="not signed"):
        s.members["node-00"].list_all({**s.listed, "node-01": Keys(bytes(32), bytes(31), b"")})
    s.members["node-01"].list_all(s.listed)
    with pytest.raises(MessageError, match="no shares"):
        s.members["node-01"].mask(s.x["node-01"], ASKED, {})
    s.members["node-02"].shares(s.listed)
    with pytest.raises(MessageError, match="may be lost"):
        s.members["node-02"].mask_all(s.x["node-02"], ASKED)
    with pytest.raises(MessageError, match="too few"):
        t = Sum(4, colluders=2)
        t.keys()
        t.members["node-00"].list_all(t.listed)
