# SPDX-License-Identifier: Apache-2.0
"""The one exception for a mistake of the user's."""


class SmolLM3Error(ValueError):
    """One line that names the value, what is allowed and what to do; the scripts print it and exit with 2."""
