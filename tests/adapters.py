# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""The adapters of duomoe.verification, under the name that the tests import."""

from duomoe.verification.adapters import BFLOAT16, DTYPES, JaxAdapter, TorchAdapter, bits

__all__ = ["BFLOAT16", "DTYPES", "JaxAdapter", "TorchAdapter", "bits"]
