// Rows of weights as the definitions read them.
#pragma once

#include <algorithm>

#include "backend/host.h"

namespace delta {

// Rows of weights, decoded exactly: each call of row() overwrites what the one before returned.
class Decoder {
   public:
    Decoder(Workspace& space, int64_t n) : narrow_(space.take<float>(static_cast<size_t>(n))), wide_(space.take<double>(static_cast<size_t>(n))) {}

    const double* row(const Weight& w, int64_t mat, int64_t r) { return row(*w.type, w.row(mat, r), w.cols); }
    const double* row(const TypeInfo& type, const uint8_t* data, int64_t n) {
        type.to_float(data, narrow_, n);
        std::copy_n(narrow_, n, wide_);
        return wide_;
    }

   private:
    float* narrow_;
    double* wide_;
};

}  // namespace delta
