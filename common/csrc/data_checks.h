// Copyright 2026 The duomoe authors
// SPDX-License-Identifier: Apache-2.0
//
// Faults in data (ids out of range, rows beyond max_rows) are dropped and counted by the kernels.
// With debug checks on they are errors that name the token. The checks read tensors on the host: on
// a GPU they wait for the stream.
#pragma once

#include "registry.h"

namespace duomoe {

DUOMOE_EXPORT void set_debug_checks(bool on);
bool debug_checks();

// Copies a tensor's bytes to the host, when all work queued before is done.
using Fetch = Status (*)(Executor& executor, const TensorView& view, void* host);
bool register_fetch(Backend backend, Fetch fetch);

Status check_inputs_data(const Call& call, Backend backend);
Status check_outputs_data(const Call& call, Backend backend);

}  // namespace duomoe
