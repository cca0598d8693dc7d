// Checkpoints: a position and a copy of the recurrent part of a slot. Latents are append-only, so up to a position where the
// tokens agree they are still right and need no copy. The memory is a fixed number of places shared by all sessions; this file
// decides who has to give one up. Not thread-safe: the pool of sessions locks around it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "backend/backend.h"

namespace delta {

class CheckpointStore {
   public:
    // `memory` is [n_places][bytes_each] on the device of `backend`.
    CheckpointStore(Backend& backend, uint8_t* memory, size_t bytes_each, uint32_t n_places)
        : backend_(backend), memory_(memory), bytes_each_(bytes_each), places_(n_places) {}

    size_t n_places() const { return places_.size(); }
    size_t bytes_each() const { return bytes_each_; }
    size_t count(int32_t slot) const;  // checkpoints of one session
    size_t count() const;              // places in use

    // Copies `recurrent`, the state of `slot` after `position` tokens. Does nothing if the session has a checkpoint there or there is
    // no place at all.
    void save(int32_t slot, size_t position, const uint8_t* recurrent);
    bool has(int32_t slot, size_t position) const;
    // Position of the newest checkpoint of `slot` not beyond `limit`; 0, which needs none, if there is no such checkpoint.
    size_t newest(int32_t slot, size_t limit) const;
    // Copies the checkpoint at `position`, which must exist, back.
    void restore(int32_t slot, size_t position, uint8_t* recurrent);
    // Gives up the checkpoints of `slot` beyond `position`: the timeline no longer goes there.
    void drop_beyond(int32_t slot, size_t position);
    void drop_all(int32_t slot);
    // Lets `to` use all checkpoints of `from`: a fork has the same past.
    void share(int32_t from, int32_t to);

   private:
    struct Place {
        size_t position = 0;
        std::vector<int32_t> owners;  // slots; none: the place is free
        uint64_t used = 0;            // time of the last save or restore
        bool owned_by(int32_t slot) const;
    };

    Place* find(int32_t slot, size_t position);
    size_t take_place(int32_t slot, size_t position);
    size_t victim_of(int32_t slot, size_t position_now) const;
    uint8_t* data(size_t place) const { return memory_ + place * bytes_each_; }

    Backend& backend_;
    uint8_t* memory_;
    size_t bytes_each_;
    std::vector<Place> places_;
    uint64_t clock_ = 0;
};

}  // namespace delta
