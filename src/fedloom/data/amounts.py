"""Words that are numbers to a reader, but not to the grammar: 36,9 or 1'000, with a currency, a
unit, a mark or a comparison beside them.

Some words mean an amount wherever they stand, such as 70 kg. Others, such as >70, 5* and 2 (low),
may name a category: they are amounts if more than ten of a column differ. So may 12 rooms and 3
rooms, which are amounts if more than twenty differ.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping

_FEW = 10
_MANY = 20
_PLAIN = r"([0-9]+[.,][0-9]+|[0-9]{1,3}([,.' _][0-9]{3})+([.,][0-9]+)?|[0-9]+)"
_AMOUNT = rf"[-+]?{_PLAIN}([eE][-+]?[0-9]+)?( ?[xX×*·⋅] ?10(\^|\*\*)?-?[0-9]+)?"
_CURRENCY = (
    r"(?i:(US|C|A|R)?[$€£¥₹₽₩₺]|EUR|USD|GBP|CHF|JPY|CNY|INR|CAD|AUD|SEK|NOK|DKK|PLN|BRL|euros?|"
    r"dollars?|kr\.?|zł|(?-i:Rs)\.?)"
)
_DECIMAL = "[0-9]+[.,][0-9]+"
# a letter by itself may name a category, so only some are units
_BASE = (
    r"([glLmhsykKVW]|°|oC|oF|(?i:"
    r"[kmcdμunphf]g|mcg|lbs?|oz|tons?|tonnes?|(kilo)?gram(me)?s?|kilos?|pounds?|ounces?|stones?|"
    r"[kcmdμun]m|in|inch(es)?|ft|foot|feet|yds?|yards?|mi|miles?|(kilo|centi|milli)?met(er|re)s?|"
    r"[mdcμuhfp]l|cc|gallons?|gal|pints?|(milli)?lit(er|re)s?|[kmμunp]?mol|m?eq|m?osmol|m?osm|"
    r"[mμu]?iu|mm ?hg|cm ?h2o|[khm]pa|m?bar|psi|atm|torr|k?cal|kj|[km]wh?|[mk]v|ma|db|[kmg]?hz|"
    r"[kmgt]b|secs?|seconds?|mins?|minutes?|hrs?|hours?|wks?|weeks?|mos?|mths?|months?|yrs?|years?|"
    r"y\.?o\.?|y/o|[mμun]s|bpm|rpm|mph|kmh|kph|ppm|ppb|pct|percent|sq\.? ?(m|ft|km)|ha|°[cfk]|"
    r"deg(rees?)?( ?[cf])?))"
)
_ATOM = rf"{_BASE}(\^?-?[23])?"
_PER = rf"( ?[/·⋅] ?([0-9.]+ ?)?[^\W\d_][^\W_]*(\^?-?[0-9])?| {_BASE}\^?-[123])"
_UNIT = (
    rf"[%‰]|{_ATOM}{_PER}*( old|\.)?|[^\W\d_]{{1,12}} ?/ ?([0-9.]+ ?)?{_ATOM}|"
    rf"/ ?([0-9.]+ ?)?{_ATOM}"
)
_MEASURED = rf"{_AMOUNT} ?([\[(]?({_UNIT})[\])]?)?"
_TIMES = r"(k|K|M|m|mn|bn|Mio\.?)"
_SURE = re.compile(
    rf"{_MEASURED}|[-+]?{_CURRENCY} ?{_AMOUNT} ?{_TIMES}?|{_AMOUNT} ?{_TIMES}? ?{_CURRENCY}|"
    # 12.5 kg of any unit; (12.50) and '0.5' and ~0.5; 12.50- and 0.5*; 1.5D+01
    rf"[-+]?{_DECIMAL} ?[^\W\d_]{{1,5}}|[=('\"~≈]{{1,2}}[-+]?{_DECIMAL}[)'\"]?|"
    rf"{_DECIMAL} ?[-*†‡]+|{_AMOUNT},-+|[-+]?{_DECIMAL}[dD][-+]?[0-9]+|"
    # 5'11" and 5 ft 11; 52°31' N; 1 1/2 and 1½
    r"[0-9]+ ?(['′’]|ft\.?|feet) ?([0-9]+([.,][0-9]+)? ?([\"″”]|'{2}|′{2}|in\.?|inch(es)?)?)?|"
    r"[0-9.]+° ?([0-9.]+['′’] ?([0-9.]+(\"|″|”|''|′′)? ?)?)?[NSEWO]?|[0-9]+ [0-9]+[/⁄][0-9]+|"
    r"[0-9]+⁄[0-9]+"
)
_PERHAPS = re.compile(
    rf"([<>]=?|=[<>]|[≤≥~≈±]|(?i:ca\.?|approx\.?|about)) ?{_MEASURED}|"
    rf"['\"=(`’]{{1,2}}{_MEASURED}['\")]?|{_MEASURED} ?([-+*†‡§#!↑↓]+|HH?|LL?|(?i:high|low))|"
    rf"{_MEASURED} ?[(\[][^()\[\]]{{1,12}}[)\]]|{_MEASURED} ?(±|\+/?-) ?{_MEASURED}"
)
_COUNTED = re.compile(rf"{_AMOUNT} ?(?!(?:st|nd|rd|th)\b)(?P<unit>[^\W\d_]+([ ./-][^\W\d_]+)?)")
_PAIR = re.compile(rf"[0-9]+([.,][0-9]+)? ?[/⁄+] ?[0-9]+([.,][0-9]+)?( ?({_UNIT}))?")
_MINUS = str.maketrans("\u2212\u2010\u2011\u2012\u2013\uff0d", "------")


def is_pair(word: str) -> bool:
    """Whether a word is two numbers, such as a blood pressure, 120/80, or weeks and days, 38+2."""
    return _PAIR.fullmatch(word) is not None


def amounts(words: Mapping[str, int], is_number: Callable[[str], bool]) -> set[str]:
    """Those of words -> rows of a column that look like numbers which the grammar does not read;
    `is_number` says which it does.
    """
    plain = {word: _plain(word) for word in words if not is_number(word)}
    sure = {word for word, form in plain.items() if _SURE.fullmatch(form)}
    perhaps = {word for word in plain if word not in sure and _PERHAPS.fullmatch(plain[word])}
    if len(perhaps) + len(words) - len(plain) > _FEW:
        sure |= perhaps
    counted = {word: found["unit"] for word in plain if (found := _COUNTED.fullmatch(plain[word]))}
    # a column of other words in all rows names them
    common = Counter(counted.values()).most_common(1)
    if len(words) < sum(words.values()) and common and common[0][1] > _MANY:
        sure |= {word for word, unit in counted.items() if unit == common[0][0]}
    return sure


def _plain(word: str) -> str:
    """A word in one Unicode form, with digits and minus signs of ASCII and single spaces."""
    form = unicodedata.normalize("NFKC", word).translate(_MINUS)
    return " ".join("".join(str(unicodedata.decimal(sign, sign)) for sign in form).split())
