"""The record, `record.jsonl`: its events (`events`), and how it is written and read."""

from regrepro.record.events import SCHEMA
from regrepro.record.reader import Record, key_of, part_of, read_record, record_path
from regrepro.record.writer import (
    FILE_NAME,
    Encoded,
    RecordProblem,
    RecordWriter,
    UndeclaredError,
    encode,
    encoded,
)

__all__ = [
    "FILE_NAME",
    "SCHEMA",
    "Encoded",
    "Record",
    "RecordProblem",
    "RecordWriter",
    "UndeclaredError",
    "encode",
    "encoded",
    "key_of",
    "part_of",
    "read_record",
    "record_path",
]
