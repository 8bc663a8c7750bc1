// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Set by the build from pyproject.toml.
#ifndef DUOMOE_VERSION
#error "DUOMOE_VERSION is not defined"
#endif
