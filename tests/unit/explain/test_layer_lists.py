"""The schemas and docs/verdicts.md list the layers of judge/layer_table.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from regrepro.explain.layer_lists import FILES, with_layers
from regrepro.judge import LAYERS

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", FILES)
def test_the_list_of_layers_is_made_from_the_table(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert text == with_layers(text), "python -m regrepro.explain.layer_lists . makes it anew"
    spoilt = text.replace("page-migration", "page-motion")  # as after a layer was renamed
    assert all(layer in with_layers(spoilt) for layer in LAYERS)
    assert with_layers(spoilt) != spoilt


def test_the_rule_of_every_layer_is_described() -> None:
    text = (ROOT / "docs/verdicts.md").read_text(encoding="utf-8")
    rules = re.findall(r"^\| `([a-z-]+)` \| [^|]+ \| [^|]{20,} \|", text.split("## Layers")[1], re.M)
    assert rules[: len(LAYERS)] == list(LAYERS)
