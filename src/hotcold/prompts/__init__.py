"""Prompts: read from where the user has them, checked row by row, held out, put in an order; and demonstrations."""

from hotcold.prompts.columns import Prompt, find_column, make_prompts
from hotcold.prompts.demonstrations import (
    Demonstration,
    apart_from,
    distinct_demonstrations,
    fingerprint_demonstrations,
    hold_out_demonstrations,
    make_demonstrations,
)
from hotcold.prompts.order import PromptOrder, distinct, fingerprint, hold_out
from hotcold.prompts.rows import read_rows

__all__ = [
    "Demonstration",
    "Prompt",
    "PromptOrder",
    "apart_from",
    "distinct",
    "distinct_demonstrations",
    "find_column",
    "fingerprint",
    "fingerprint_demonstrations",
    "hold_out",
    "hold_out_demonstrations",
    "make_demonstrations",
    "make_prompts",
    "read_rows",
]
