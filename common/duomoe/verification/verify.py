# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""`duomoe verify`: compare the front ends at the user's own shapes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from duomoe.verification import compare, environment, report
from duomoe.verification.inputs import Options


def verify(options: Options, json_path: Path | None = None) -> bool:
    """Compare, print the table, write the report; return whether every bit agrees.

    Raises:
        environment.CannotRun: a front end or the device is missing.
    """
    environment.require_front_ends()
    environment.require_device(options.device)
    result = compare.compare_all(options)
    print(report.comparison_table(result.comparisons))
    print()
    for sentence in report.problems(result, options.device):
        print(sentence)
    print(report.summary(result))
    if json_path is not None:
        content = {
            "command": "verify",
            "options": dataclasses.asdict(options),
            "environment": environment.environment(options.device),
            **report.result_json(result),
        }
        report.write_json(json_path, content)
    return result.passed
