"""What a user can cause, as one short message: what was given, what was needed, what to do."""

from difflib import get_close_matches

LONGEST = 200  # characters of a word that somebody may have mistyped


class InputError(ValueError):
    """Wrong input. The command line prints the message alone and exits with code 2."""


class RewardError(InputError):
    """A reward function failed or returned something that is not a score. The run stops and can be resumed."""


class OutOfMemory(InputError):
    """A computation does not fit in memory. An update goes on with smaller micro-batches, as long as there are any."""


class DiskError(OSError):
    """The disk or the folder of a run takes no more. What was saved is whole, and the run can go on from it."""


class NotAvailableError(InputError):
    """A key, preset or quantity that the design names and this version does not build."""


def shown(text: str, lines: int = 5, width: int = 900) -> str:
    """A message may hold anything of the user's files: it is cut, and what would steer a terminal is spelt out."""
    cut = [line if len(line) <= width else f"{line[:width]} ..." for line in text.splitlines()[:lines]]
    return "\n".join("".join(c if c.isprintable() else repr(c)[1:-1] for c in line) for line in cut)


def did_you_mean(word: str, known: list[str]) -> str:
    """' Did you mean "x"?' for the closest of `known`, or an empty string."""
    near = [name for name in known if len(name) < 2 * len(word) + 20]  # others are not close, and take long to compare
    close = get_close_matches(word, near, n=1, cutoff=0.6) if len(word) < LONGEST else []
    return f' Did you mean "{close[0]}"?' if close else ""
