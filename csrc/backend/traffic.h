// Bytes that an op has to move, from its definition: for profiles.
#pragma once

#include "backend/host.h"

namespace delta {

// Of weights, each byte counted once however many rows use it: of an embedding table the rows of the tokens, of routed experts those
// that the route names. `type` is the type of the values of `call`.
uint64_t weight_bytes_read(const OpCall& call, ValueType type);

// Of the states of the sequences: convolution inputs and S read and written, latents written once and read once for all heads.
uint64_t state_bytes_moved(const OpCall& call);

}  // namespace delta
