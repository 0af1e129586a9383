# SPDX-License-Identifier: Apache-2.0
class DeviceError(RuntimeError):
    """What the emulated runtime refuses or fails at; the message is one line that says all."""
