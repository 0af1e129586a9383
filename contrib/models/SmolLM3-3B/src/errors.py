# SPDX-License-Identifier: Apache-2.0
"""The one exception for a mistake of the user's, and the one for a model that is broken."""

LONGEST = 1000  # characters of a message


class SmolLM3Error(ValueError):
    """One line that names the value, what is allowed and what to do; the scripts print it and exit with 2.

    Whatever a value or a file's name brings, it is one line, of which the middle is left out where it would be long.
    """

    def __init__(self, message: str):
        line = " ".join(message.split("\n"))
        if len(line) > LONGEST:
            line = f"{line[: LONGEST // 2]} ... {line[-LONGEST // 2 :]}"
        super().__init__(line)


class NotANumber(RuntimeError):
    """The model is broken: nothing can be chosen from what it returned. The scripts print it and exit with 1."""
