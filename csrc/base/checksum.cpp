#include "base/checksum.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace delta {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr uint64_t kP1 = 0x9e3779b185ebca87, kP2 = 0xc2b2ae3d27d4eb4f, kP3 = 0x165667b19e3779f9, kP4 = 0x85ebca77c2b2ae63,
                   kP5 = 0x27d4eb2f165667c5;

template <class Word>
uint64_t load(const uint8_t* at) {
    Word word;
    std::memcpy(&word, at, sizeof word);
    return word;
}

uint64_t round(uint64_t lane, uint64_t word) { return std::rotl(lane + word * kP2, 31) * kP1; }

}  // namespace

void Checksum::consume(const uint8_t* block) {
    for (int i = 0; i < 4; ++i) {
        lane_[i] = round(lane_[i], load<uint64_t>(block + 8 * i));
    }
}

void Checksum::update(const void* data, size_t n_bytes) {
    if (n_bytes == 0) {
        return;  // `data` may be null
    }
    const auto* at = static_cast<const uint8_t*>(data);
    n_bytes_ += n_bytes;
    if (n_pending_ != 0) {
        const size_t taken = std::min(n_bytes, sizeof pending_ - n_pending_);
        std::memcpy(pending_ + n_pending_, at, taken);
        n_pending_ += taken;
        at += taken;
        n_bytes -= taken;
        if (n_pending_ < sizeof pending_) {
            return;
        }
        consume(pending_);
        n_pending_ = 0;
    }
    for (; n_bytes >= 32; at += 32, n_bytes -= 32) {
        consume(at);
    }
    if (n_bytes != 0) {
        std::memcpy(pending_, at, n_bytes);
        n_pending_ = n_bytes;
    }
}

uint64_t Checksum::digest() const {
    uint64_t hash = kP5;
    if (n_bytes_ >= 32) {
        hash = std::rotl(lane_[0], 1) + std::rotl(lane_[1], 7) + std::rotl(lane_[2], 12) + std::rotl(lane_[3], 18);
        for (const uint64_t lane : lane_) {
            hash = (hash ^ round(0, lane)) * kP1 + kP4;
        }
    }
    hash += n_bytes_;
    const uint8_t* at = pending_;
    const uint8_t* end = pending_ + n_pending_;
    for (; end - at >= 8; at += 8) {
        hash = std::rotl(hash ^ round(0, load<uint64_t>(at)), 27) * kP1 + kP4;
    }
    for (; end - at >= 4; at += 4) {
        hash = std::rotl(hash ^ load<uint32_t>(at) * kP1, 23) * kP2 + kP3;
    }
    for (; at != end; ++at) {
        hash = std::rotl(hash ^ *at * kP5, 11) * kP1;
    }
    hash = (hash ^ hash >> 33) * kP2;
    hash = (hash ^ hash >> 29) * kP3;
    return hash ^ hash >> 32;
}

uint64_t checksum(const void* data, size_t n_bytes) {
    Checksum sum;
    sum.update(data, n_bytes);
    return sum.digest();
}

}  // namespace delta
