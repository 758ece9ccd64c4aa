"""The eviction record as a format that any engine can write: arrays, files, a converter and a checker."""

from sparse_rl_lightning.integrations.record.check import Verdict, check_record
from sparse_rl_lightning.integrations.record.files import read_record, record_bytes, record_from_bytes, write_record
from sparse_rl_lightning.integrations.record.format import SampledRecord
from sparse_rl_lightning.integrations.record.kept import Kept, Request, record_of_kept

__all__ = [
    "Kept",
    "Request",
    "SampledRecord",
    "Verdict",
    "check_record",
    "read_record",
    "record_bytes",
    "record_from_bytes",
    "record_of_kept",
    "write_record",
]
