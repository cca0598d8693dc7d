// The slots of a model: who owns which, and where the state of a slot lies. A slot belongs to one session. Not thread-safe: the
// pool of sessions locks around acquire and release; the memory of a slot is touched by the running computation only.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/model.h"

namespace delta {

class StatePool {
   public:
    explicit StatePool(const Model& model) : model_(model), used_(model.params.n_sessions, false) {}

    // The lowest free slot. Throws Error(STATE) if there is none.
    int32_t acquire();
    void release(int32_t slot) { used_[static_cast<size_t>(slot)] = false; }
    int32_t n_used() const;

    uint8_t* recurrent(int32_t slot) const;             // [recurrent_bytes]
    uint8_t* latents(int32_t slot, int32_t mla) const;  // [n_ctx, latent_row_bytes]
    float* logits(int32_t slot) const;                  // [n_vocab], the last row of the session

    // The state before the first token. Latents need none: a position is written before it is read.
    void clear(int32_t slot) const;
    // Copies the state after `n_positions` tokens.
    void copy(int32_t from, int32_t to, size_t n_positions) const;

   private:
    const Model& model_;
    std::vector<bool> used_;
};

}  // namespace delta
