"""The judge: record → verdicts. A pure function over what was recorded; no kernel, no device, no clock.

It imports nothing but the standard library, `regrepro.errors`, `regrepro.kernel_functions` and
`regrepro.record`, so that anyone can run it on a record alone.
"""

from regrepro.judge.declared import as_declared
from regrepro.judge.layer_table import LAYERS
from regrepro.judge.questions import QUESTIONS, Answer, Standing, answer, exit_code
from regrepro.judge.verdict import SCHEMA, judge_record

__all__ = [
    "LAYERS",
    "QUESTIONS",
    "SCHEMA",
    "Answer",
    "Standing",
    "answer",
    "as_declared",
    "exit_code",
    "judge_record",
]
