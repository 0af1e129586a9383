# SPDX-License-Identifier: Apache-2.0
"""Which layer is wrong where nothing can be looked at inside of the model: whole models of its first layers tell."""

from collections.abc import Callable


def first_wrong_layer(num_layers: int, is_wrong: Callable[[int], bool]) -> int | None:
    """Returns the index of the first of `num_layers` layers that is wrong, or None where no cut is.

    `is_wrong` judges a model of the first so many layers. A model of all of them is known to be wrong, so it is asked
    for only where every shorter one that was asked for is right.
    """
    right, wrong = 0, num_layers
    while wrong - right > 1:
        middle = (right + wrong) // 2
        if is_wrong(middle):
            wrong = middle
        else:
            right = middle
    if wrong == num_layers and not is_wrong(num_layers):
        return None
    return wrong - 1
