from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedloom.core.errors import DataError
from fedloom.data.alignment import near_misses
from fedloom.data.columns import RawColumn
from fedloom.data.encoder import TableEncoder
from fedloom.data.options import DataOptions
from fedloom.data.party_files import from_files
from fedloom.data.stats import describe_parties
from fedloom.data.tables import class_numbers, read_csv
from fedloom.data.vertical import VerticalDataset, encode_new_rows


def match(ids: list[list[str]]) -> list[np.ndarray]:
    """The people that all have, in an order of no meaning."""
    shared = sorted(set(ids[0]).intersection(*ids[1:]), reverse=True)
    return [np.array([words.index(word) for word in shared], dtype=np.int64) for words in ids]


def write(path: Path, header: str, rows: list[str]) -> Path:
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """People 000..039 at the bank, 010..049 at the shop, 005..044 at the phone company; 012 has no
    label.
    """
    bank = [f"{n:03},{n * 1.5},{'' if n == 12 else 'good' if n % 3 else 'bad'}" for n in range(40)]
    shop = [
        f"{n:03},{'?' if n % 7 == 0 else 100 - n},{'town' if n % 2 else 'land'}"
        for n in range(49, 9, -1)
    ]
    phone = [f"{n:03},{n % 5}" for n in range(5, 45)]
    return [
        write(tmp_path / "bank.csv", "id,income,risk", bank),
        write(tmp_path / "shop.csv", "id,spent,where", shop),
        write(tmp_path / "phone.csv", "id,calls", phone),
    ]


def gather(files: list[Path], **options: Any) -> VerticalDataset:
    usual: dict[str, Any] = {"id": "id", "label": "risk", "seed": 0, "align": match}
    return from_files(files, **usual | options)


def people(parties: VerticalDataset, part: str) -> list[int]:
    """Who is who at the bank, by income."""
    bank = parties.views[0]
    everybody = np.arange(40)
    incomes = encode_new_rows(bank.recipe, {"income": everybody * 1.5})[:, 0].tolist()
    return [incomes.index(value) for value in bank.x[getattr(bank, part), 0].tolist()]


def test_files_of_several_parties(files: list[Path]) -> None:
    parties = gather(files)
    assert [view.name for view in parties.views] == [
        "bank",
        "shop",
        "phone",
    ] and parties.name == "bank"
    assert parties.classes == ("bad", "good")
    aligned, test = people(parties, "aligned"), people(parties, "test")
    assert sorted(aligned + test) == [n for n in range(10, 40) if n != 12] and len(test) == 7
    assert parties.labels.tolist() == [int(n % 3 != 0) for n in aligned]
    assert parties.test_labels.tolist() == [int(n % 3 != 0) for n in test]
    assert sorted(people(parties, "unaligned")) == [*range(10), 12]
    shop, phone = parties.views[1:]
    names = ["spent", "spent missing", "where=land", "where=town"]
    assert shop.x.shape == (len(aligned) + len(test) + 11, len(names))
    for part, who in (("aligned", aligned), ("test", test)):
        assert shop.x[getattr(shop, part), 1].tolist() == [float(n % 7 == 0) for n in who]
        assert shop.x[getattr(shop, part), 3].tolist() == [float(n % 2) for n in who]
        order = np.unique(phone.x[:, 0]).tolist()
        assert [order.index(value) for value in phone.x[getattr(phone, part), 0]] == [
            n % 5 for n in who
        ]
    assert [len(view.unaligned) for view in parties.views] == [11, 11, 11]
    assert [view.truth for view in parties.views] == [None, None, None]  # 012 has no label


def test_each_file_has_its_own_decimal_sign(files: list[Path]) -> None:
    plain = gather(files)
    files[1].write_text(
        files[1].read_text().replace(",", ";").replace("?", "0,5"), encoding="utf-8"
    )
    shop = gather(files, options=DataOptions(decimal={"shop.csv": ","})).views[1]
    assert shop.recipe["decimal"] == "," and shop.x.shape == (len(plain.views[1].x), 3)
    with pytest.raises(DataError, match="the file 'shop'"):
        gather(files, options=DataOptions(decimal={"shop": ","}))


def test_validation_people_stand_in_for_the_test(files: list[Path]) -> None:
    whole, part = gather(files), gather(files, validation=0.25)
    used = [person for name in ("aligned", "test") for person in people(part, name)]
    assert sorted(used + people(whole, "test")) == [n for n in range(10, 40) if n != 12]
    assert len(people(part, "test")) == 6 and people(part, "unaligned") == people(
        whole, "unaligned"
    )


def test_fewer_aligned_people_are_dealt_to_one_party_each(files: list[Path]) -> None:
    whole, few = gather(files), gather(files, aligned=10)
    assert people(few, "aligned") == people(whole, "aligned")[:10] and people(
        few, "test"
    ) == people(whole, "test")
    assert [len(view.unaligned) for view in few.views] == [11 + 4, 11 + 4, 11 + 4]
    own = set(people(few, "unaligned")) - {*range(10), 12}
    assert own == set(people(whole, "aligned")[10::3])
    assert len(gather(files, test_rows=3).test_labels) == 3


def test_the_order_of_an_alignment_does_not_matter(files: list[Path]) -> None:
    other = gather(files, align=lambda ids: [rows[::-1] for rows in match(ids)])
    assert (other.views[1].x == gather(files).views[1].x).all()


def test_the_truth_is_known_where_labels_are(files: list[Path]) -> None:
    rows = files[0].read_text().replace("012,18.0,\n", "012,18.0,bad\n")
    files[0].write_text(rows)
    parties = gather(files)
    truth = parties.views[0].truth
    assert truth is not None and truth.tolist() == [
        int(n % 3 != 0) for n in people(parties, "unaligned")
    ]
    assert parties.views[1].truth is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"id": "name"}, "must have a column 'name'"),
        ({"id": ["id", "id"]}, "one id or one for each"),
        ({"label": "risc"}, "Did you mean 'risk'"),
        ({"aligned": 40}, "at most 22"),
        ({"aligned": 0}, "at least 1"),
        ({"test_fraction": 0.0}, "test_fraction"),
        ({"align": lambda ids: [np.arange(3)] * 2}, "for 3 parties"),
        ({"align": lambda ids: [np.array([0, 0])] * 3}, "distinct row numbers"),
        ({"align": lambda ids: [np.array([0, 99])] * 3}, "distinct row numbers"),
        ({"align": lambda ids: [np.array([], dtype=np.int64)] * 3}, "0 people in common"),
    ],
)
def test_what_cannot_be_gathered(files: list[Path], options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        gather(files, **options)


def test_a_typo_is_refused_and_a_constant_column_is_reported(
    files: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    lines = [
        line + (",clinic" if n else ",site")
        for n, line in enumerate(files[2].read_text().splitlines())
    ]
    files[2].write_text("\n".join(lines))
    assert [party["dropped"] for party in describe_parties(gather(files))["parties"]] == [
        [],
        [],
        ["site"],
    ]
    assert len(caplog.records) == 1 and "party 'phone': dropped 1 columns" in caplog.text
    lines[9] = lines[9].replace(",3,", ",3o,")
    files[2].write_text("\n".join(lines))
    with pytest.raises(
        DataError,
        match=r"Party 'phone': Column 'calls' .* 1 of its \d+ values are not, such as '3o'",
    ):
        gather(files)


def test_labels_stay_at_the_first_party(files: list[Path]) -> None:
    with pytest.raises(DataError, match="Only the active party"):
        gather([files[0], files[0]])
    with pytest.raises(DataError, match="at least 2 files"):
        gather(files[:1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("id,a\n", "rows below"),
        ("id,a\n1,2\n1\n", "line 3: expected 2 values"),
        ("id,id\n1,2\n", "must be unique"),
        ("id,\n1,2\n", "column 2 of 2 has no name"),
        ('id,a\n"1,2\n', "cannot be read"),
    ],
)
def test_broken_csv_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_csv(path, needed=["id"])


def test_a_csv_keeps_text_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbfid, a\r\n007,"x, y"\r\n\r\n008, z \r\n')
    assert {name: column.text for name, column in read_csv(path).items()} == {
        "id": ["007", "008"],
        "a": ["x, y", "z"],
    }
    (tmp_path / "b.csv").write_bytes(b"id\n\xff\n")
    for name, message in {
        "b.csv": "is not text in UTF-8",
        "missing.csv": "there is no file",
    }.items():
        with pytest.raises(DataError, match=message):
            read_csv(tmp_path / name)


def test_columns_are_numbers_if_all_their_values_are() -> None:
    assert RawColumn.of("a", ["1", "", "2.5", "NA"]).values[[0, 2]].tolist() == [1.0, 2.5]
    assert np.isnan(RawColumn.of("a", ["1", "", "?"]).values[1:]).all()
    assert RawColumn.of("a", ["1", "one", "?"]).values.tolist() == ["1", "one", None]


def test_classes_are_in_order() -> None:
    y, classes = class_numbers(RawColumn.of("y", ["10", "9", "", "10"]), "Column 'y'")
    assert y.tolist() == [1, 0, -1, 1] and classes == ("9", "10")
    with pytest.raises(DataError, match="at least 2 classes"):
        class_numbers(RawColumn.of("y", ["a", "a", "?"]), "Column 'y'")


def test_settings_of_cells_apply_to_all_files(files: list[Path], tmp_path: Path) -> None:
    rows = [
        f"{n:03};{n % 7},5;{'-' if n % 5 == 0 else n % 4};{n % 3};it is person {n}"
        for n in range(40)
    ]
    write(
        files[0],
        "id;income;risk",
        [f"{n:03};{n},5;{'good' if n % 3 else 'bad'}" for n in range(40)],
    )
    shop = write(files[1], "id;spent;visits;zone;said", rows)
    options = DataOptions(
        decimal=",", missing_words=("-",), encode={"zone": "category"}, drop=("inc*",)
    )
    with pytest.raises(
        DataError, match="Party 'bank': A party needs a column besides ids and label, but has none"
    ):
        gather(files[:2], options=options)
    party = gather(files[:2], options=replace(options, drop=())).views[1]
    assert party.recipe["decimal"] == "," and party.recipe["missing_words"] == ["-"]
    names = [name for rule in TableEncoder.from_dict(party.recipe).columns for name in rule.names]
    assert names[:4] == ["spent", "visits", "visits missing", "zone=0"] and "said#0" in names
    with pytest.raises(DataError, match="encode names the column 'zones', but the files have"):
        gather(files[:2], options=replace(options, drop=(), encode={"zones": "category"}))
    pandas = pytest.importorskip("pandas")
    pandas.read_csv(shop, sep=";", decimal=",", dtype={"id": str}).to_parquet(
        tmp_path / "shop.parquet"
    )
    same = gather([files[0], tmp_path / "shop.parquet"], options=replace(options, drop=())).views[1]
    assert (same.x == party.x).all() and same.recipe == party.recipe


def test_ids_that_differ_in_writing_only_are_named() -> None:
    (sentence,) = near_misses(
        [["1", "2", "a"], ["01", "2", "b"], ["1", "A"]], ["bank", "shop", "phone"]
    )
    assert sentence.startswith(
        "1 ids of shop differ from one of bank in writing only, such as '01' and '1'"
    )
