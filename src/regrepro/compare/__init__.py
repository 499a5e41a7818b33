"""Two run directories held side by side: which facts differ, which verdicts changed, and what that proves."""

from regrepro.compare.changes import SCHEMA, Change, Comparison, compare, exit_code
from regrepro.compare.facts import Difference, differences

__all__ = ["SCHEMA", "Change", "Comparison", "Difference", "compare", "differences", "exit_code"]
