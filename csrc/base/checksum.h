// XXH64 with seed 0: fingerprints and damage detection, not security.
#pragma once

#include <cstddef>
#include <cstdint>

namespace delta {

class Checksum {
   public:
    void update(const void* data, size_t n_bytes);
    uint64_t digest() const;

   private:
    void consume(const uint8_t* block);  // 32 bytes

    uint64_t lane_[4] = {0x60ea27eeadc0b5d6, 0xc2b2ae3d27d4eb4f, 0, 0x61c8864e7a143579};  // P1 + P2, P2, 0, -P1
    uint8_t pending_[32] = {};
    size_t n_pending_ = 0;
    uint64_t n_bytes_ = 0;
};

uint64_t checksum(const void* data, size_t n_bytes);

}  // namespace delta
