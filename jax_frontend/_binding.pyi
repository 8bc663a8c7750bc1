# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
from typing import Any

def handlers() -> dict[str, tuple[Any, Any]]: ...
