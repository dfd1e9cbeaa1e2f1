"""Prompts: read from where the user has them, checked row by row, held out, put in an order."""

from hotcold.prompts.columns import Prompt, find_column, make_prompts
from hotcold.prompts.order import PromptOrder, distinct, fingerprint, hold_out
from hotcold.prompts.rows import read_rows

__all__ = ["Prompt", "PromptOrder", "distinct", "find_column", "fingerprint", "hold_out", "make_prompts", "read_rows"]
