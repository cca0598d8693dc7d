#include "runtime/state.h"

#include <algorithm>

#include "base/error.h"

namespace delta {

int32_t StatePool::acquire() {
    for (size_t slot = 0; slot < used_.size(); ++slot) {
        if (!used_[slot]) {
            used_[slot] = true;
            return static_cast<int32_t>(slot);
        }
    }
    throw Error(DELTA_STATE, format("all %zu session slots of this model are taken (n_sessions)", used_.size()));
}

int32_t StatePool::n_used() const { return static_cast<int32_t>(std::count(used_.begin(), used_.end(), true)); }

uint8_t* StatePool::recurrent(int32_t slot) const {
    return model_.recurrent->data + static_cast<size_t>(slot) * model_.layout.recurrent_bytes();
}

uint8_t* StatePool::latents(int32_t slot, int32_t mla) const { return model_.state_memory().latents(slot, mla); }

float* StatePool::logits(int32_t slot) const {
    return reinterpret_cast<float*>(model_.logits_memory->data) +
           static_cast<size_t>(slot) * static_cast<size_t>(model_.bound.hparams.n_vocab);
}

void StatePool::clear(int32_t slot) const { model_.backend->zero(recurrent(slot), model_.layout.recurrent_bytes()); }

void StatePool::copy(int32_t from, int32_t to, size_t n_positions) const {
    model_.backend->copy(recurrent(to), recurrent(from), model_.layout.recurrent_bytes());
    for (int32_t mla = 0; mla < model_.layout.n_mla; ++mla) {
        model_.backend->copy(latents(to, mla), latents(from, mla), n_positions * model_.layout.latent_row_bytes());
    }
}

}  // namespace delta
