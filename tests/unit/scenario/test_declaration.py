"""Declarations: what one holds, its variants, and one line with file, line and remedy for every mistake."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scenario_files import GOOD, load, mistake

from regrepro.scenario import in_words, needs_by_name


def test_a_good_file(tmp_path: Path) -> None:
    [one] = load(tmp_path, GOOD)
    assert one.name == "mine"
    assert one.summary == "Do as the README says."
    assert one.needs == ("root", "kernel>=5.13")
    assert one.declared()["controls"] == {"no-pin": "pin=none"}
    assert one.timeout == 30
    assert one.contract("pin") == "pin"
    assert one.contract("longterm") == "longterm"


def test_the_contract_of_a_scenario_with_its_own_kind(tmp_path: Path) -> None:
    text = GOOD.replace('{"pin": "reproduced", "longterm": "not-reproduced"}', '{"get": "reproduced"}')
    [one] = load(tmp_path, text)
    assert one.contract("pin") == "get"


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ('"root", "kernel>=5.13"', '"rot",', 6, "unknown need 'rot'; did you mean 'root'?"),
        ('"root", "kernel>=5.13"', '"kernel>5",', 6, "did you mean 'kernel>=5.13'?"),
        ('("root", "kernel>=5.13")', '"root"', 6, "needs is no list of words"),
        ('"pin": "reproduced"', '"pin": "reproducd"', 7, "did you mean 'reproduced'?"),
        ('"pin": "reproduced"', '"pni": "reproduced"', 7, "did you mean 'pin'?"),
        ('{"pin": "reproduced", "longterm": "not-reproduced"}', "{}", 7, "expects is missing"),
        ('{"no-pin": change(pin="none")}', "{}", 8, "no control"),
        ('{"no-pin": change(pin="none")}', "None", 8, "no control"),
        ('"no-pin"', '"No Pin"', 8, "no name for a control"),
        ('change(pin="none")', '"none"', 8, "is no control"),
        ('change(pin="none")', 'change(pin="nne")', 8, "did you mean 'none'?"),
        ('change(pin="none")', 'change(pn="none")', 8, "did you mean 'pin'?"),
        ('change(pin="none")', "change()", 8, "a control changes exactly one"),
        ('change(pin="none")', 'change(pin="none", place="ordinary")', 8, "a control changes exactly one"),
        ('"default", "node"', '"defualt",', 9, "did you mean 'default'?"),
        ("timeout=30", "timeout=0", 10, "timeout=0 is no time"),
        ("timeout=30", 'timeout="30"', 10, "is no time"),
        ("timeout=30", "timeot=30", 10, "did you mean 'timeout'?"),
        ('shows="section 13"', 'shows=""', 5, "shows is missing"),
        ("(stage: Stage)", "()", 12, "must take one argument"),
        ("(stage: Stage)", "(stage, more)", 12, "must take one argument"),
        ("(stage: Stage)", "(*stages)", 12, "must take one argument"),
        ("def mine", "async def mine", 4, "async"),
        ('    """Do as the README says."""\n', "", 12, "no docstring"),
        ('stage.note("hello")', "yield", 12, "generator"),
        ("import Stage, change, scenario", "import Stage, chnage, scenario", 1, "did you mean 'change'?"),
        (
            "from regrepro import",
            "import nothing_of_that_name\nfrom regrepro import",
            1,
            "nothing_of_that_name",
        ),
        ("def mine(stage: Stage) -> None:", "def mine(stage: Stage) -> None", 12, "expected ':'"),
        ("@scenario(", "1 / 0\n@scenario(", 4, "ZeroDivisionError"),
        ("@scenario(", "raise SystemExit(3)\n@scenario(", 4, "SystemExit: 3"),
        ("timeout=30", "timeout=unknown_name", 10, "NameError"),
    ],
)
def test_mistakes(tmp_path: Path, old: str, new: str, line: int, says: str) -> None:
    assert old in GOOD
    error = mistake(tmp_path, GOOD.replace(old, new))
    assert says in str(error)
    assert error.line == line


def test_missing_controls_at_all(tmp_path: Path) -> None:
    error = mistake(tmp_path, re.sub(r"    controls=.*\n", "", GOOD))
    assert "no control" in str(error)
    assert 'change(pin="none")' in str(error)


def test_the_decorator_without_its_declaration(tmp_path: Path) -> None:
    text = "from regrepro import scenario\n\n@scenario\ndef mine(stage):\n    pass\n"
    error = mistake(tmp_path, text)
    assert "write @scenario(" in str(error)
    assert error.line == 3


def test_the_same_name_twice(tmp_path: Path) -> None:
    error = mistake(tmp_path, GOOD + GOOD.split("\n\n\n")[1])
    assert "second time (first in line 4)" in str(error)


# What is expected


def test_what_is_expected_may_depend_on_the_kernel(tmp_path: Path) -> None:
    expects = """{
        "pin": {"kernel>=6.5": {"verdict": "other-failure", "layer": ["mkey", "device"]},
                "kernel<6.5": "not-reproduced"},
        "longterm": {"verdict": "other-failure", "layer": "unknown", "errno": "ENOMEM"},
    }"""
    text = GOOD.replace('{"pin": "reproduced", "longterm": "not-reproduced"}', expects)
    [item] = load(tmp_path, text)
    assert item.declared()["expects"]["pin"]["kernel<6.5"] == "not-reproduced"
    assert in_words(item.expects["pin"]) == (
        "other-failure (mkey/device) (kernel>=6.5) or not-reproduced (kernel<6.5)"
    )
    assert in_words(item.expects["longterm"]) == "other-failure (unknown, ENOMEM)"


@pytest.mark.parametrize(
    ("expected", "says"),
    [
        ('{"kernel>=6.5": "reproduced", "verdict": "unmet"}', "mixes ranges of kernels with other keys"),
        ('{"kernel>=6.5": {"kernel<7.0": "unmet"}}', "it cannot expect 'kernel<7.0'"),
        ('{"kernel>=6.5": "broken"}', "unknown verdict 'broken'"),
        ('{"layer": "mkey"}', "it expects no verdict"),
        ('{"verdict": "unmet", "layr": "mkey"}', "did you mean 'layer'?"),
        ('{"verdict": "unmet", "layer": 7}', "layer=7 is no word"),
        ('{"verdict": ["unmet", "bad"]}', "unknown verdict 'bad'"),
        ("7", "unknown verdict 7"),
        ('["unmet", "reproduced"]', 'write {"verdict": […]}'),
    ],
)
def test_what_cannot_be_expected_is_said(tmp_path: Path, expected: str, says: str) -> None:
    text = GOOD.replace('{"pin": "reproduced", "longterm": "not-reproduced"}', f'{{"pin": {expected}}}')
    assert says in str(mistake(tmp_path, text))


# Variants

VARIANTS = GOOD.replace(
    "    timeout=30,\n",
    """    timeout=30,
    tags=("mine",),
    variants={
        "small": {},
        "on_disk": {
            "needs": ("lab",),
            "expects": {"pin": {"verdict": "other-failure", "layer": "mkey"}},
            "controls": {"ordinary": change(place="ordinary")},
            "options": {"pages": 8},
            "tags": (),
        },
    },
""",
)


def test_a_variant_is_a_scenario_that_differs_in_what_it_says(tmp_path: Path) -> None:
    small, on_disk = load(tmp_path, VARIANTS)
    assert [(one.name, one.names[-1], one.function, one.variant) for one in (small, on_disk)] == [
        ("mine[small]", "mine_small", "mine", "small"),
        ("mine[on_disk]", "mine_on_disk", "mine", "on_disk"),
    ]
    assert (small.needs, small.tags) == (("root", "kernel>=5.13"), ("mine",))
    assert small.expects["pin"] == "reproduced"
    assert small.declared()["tags"] == ["mine"]
    assert (on_disk.needs, on_disk.tags, on_disk.timeout) == (("lab",), (), 30)
    assert on_disk.declared()["expects"] == {"pin": {"verdict": "other-failure", "layer": "mkey"}}
    assert on_disk.declared()["controls"] == {"ordinary": "place=ordinary"}
    assert needs_by_name([small, on_disk]) == {
        "mine[small]": small.needs,
        "mine_small": small.needs,
        "mine[on_disk]": ("lab",),
        "mine_on_disk": ("lab",),
        "mine": (*small.needs, "lab"),
    }


@pytest.mark.parametrize("owner", ["", "mine.", "mine_on_disk.", "mine[on_disk]."])
def test_an_option_of_a_variant_is_set_by_each_of_its_names(tmp_path: Path, owner: str) -> None:
    small, on_disk = load(tmp_path, VARIANTS)
    given = f"{owner}pages=3"
    assert (small.option_values([given]), on_disk.option_values([given])) == ({}, {"pages": 3})
    assert on_disk.option_values(["mine_small.pages=3"]) == {"pages": 8}


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ('"small": {}', '"small": None', 12, "variant small is no mapping"),
        ('"small"', '"Small-one"', 12, "'Small-one' is no name for a variant"),
        ('"small"', '"default"', 12, "'default' is no name for a variant"),
        ('("lab",)', '("lob",)', 12, "mine[on_disk]: unknown need 'lob'; did you mean 'lab'?"),
        ('"options"', '"optiosn"', 12, "did you mean 'options'?"),
        ('"options": {"pages": 8}', '"variants": {"x": {}}', 12, "@scenario knows no 'variants'"),
        ("timeout=30", "timeout=0", 10, "mine[small]: timeout=0 is no time"),
        ('tags=("mine",)', 'tags="mine"', 11, "tags is no list of words"),
    ],
)
def test_mistakes_in_variants(tmp_path: Path, old: str, new: str, line: int, says: str) -> None:
    assert old in VARIANTS
    error = mistake(tmp_path, VARIANTS.replace(old, new, 1))
    assert says in str(error)
    assert error.line == line


def test_no_variants_at_all(tmp_path: Path) -> None:
    text = GOOD.replace("timeout=30", "variants={}")
    assert "variants names none" in str(mistake(tmp_path, text))
