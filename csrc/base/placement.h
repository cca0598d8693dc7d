// Where threads run and where memory lies on machines with several memory nodes. Linux only; elsewhere nothing happens.
#pragma once

#include <cstdint>
#include <vector>

namespace delta {

// Binds the calling thread to one of the processors that the process may use: the `index`-th, counted so that every physical core comes
// once before any comes twice. Best effort.
void pin_this_thread(int32_t index);

// While it lives, pages that the calling thread is the first to touch are spread over all memory nodes in turn. Best effort: nothing
// happens with one node, or where the system refuses.
class InterleavedMemory {
   public:
    InterleavedMemory();
    ~InterleavedMemory();
    InterleavedMemory(const InterleavedMemory&) = delete;
    InterleavedMemory& operator=(const InterleavedMemory&) = delete;

   private:
    bool changed_ = false;
    int mode_ = 0;                      // the policy before
    std::vector<unsigned long> nodes_;  // and its nodes, as the system's bit mask
};

}  // namespace delta
