# SPDX-License-Identifier: Apache-2.0
MODEL_TYPES = {}
