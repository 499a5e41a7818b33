"""The fact sheet: what is known of a node, where each fact was read, and why the others are not known."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from regrepro.audit import parse
from regrepro.audit.reader import Text

OBSERVED = "observed"
INFERRED = "inferred"
MISSING = "missing"


@dataclass(frozen=True)
class Fact:
    """One fact. `value` is None and `why` says why where `how` is `missing`."""

    group: str
    name: str
    value: Any
    how: str
    source: str
    why: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the fact in the shape of the schema audit-1."""
        return asdict(self)


@dataclass
class Sheet:
    """All facts, in the order in which they were found."""

    facts: list[Fact] = field(default_factory=list)

    def add(
        self, group: str, name: str, value: Any, source: str, *, how: str = OBSERVED, why: str = ""
    ) -> None:
        """State a fact; a value of None states that it is not known, because of `why`."""
        if value is None:
            how = MISSING
            why = why or "not captured"
        self.facts.append(Fact(group, name, value, how, source, why if how != OBSERVED else ""))

    def state(self, group: str, name: str, text: Text, value: Any) -> None:
        """State what was made of a text: the value, or why there is none."""
        why = text.why if text.text is None else "the text has another shape than expected"
        self.add(group, name, None if text.text is None else value, text.source, why=why)

    def get(self, group: str, name: str) -> Fact | None:
        """Return a fact, or None where nothing was stated."""
        return next((fact for fact in self.facts if fact.group == group and fact.name == name), None)

    def value(self, group: str, name: str, default: Any = None) -> Any:
        """Return a fact's value, or `default` where it is not known."""
        fact = self.get(group, name)
        return default if fact is None or fact.value is None else fact.value

    def source(self, group: str, name: str) -> str:
        """Return where a fact was read."""
        fact = self.get(group, name)
        return fact.source if fact else ""

    def evidence(self, group: str, *names: str) -> list[dict[str, Any]]:
        """Return facts as evidence of a finding."""
        return [
            {"what": f"{group}/{name}", "value": self.value(group, name), "source": self.source(group, name)}
            for name in names
        ]

    def boot_arguments(self) -> dict[str, list[str]]:
        """Return the boot arguments: name → values, in their order."""
        return parse.boot_arguments(self.value("system", "boot-arguments", ""))
