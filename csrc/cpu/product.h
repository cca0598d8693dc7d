// What the ops that multiply with encoded weights share: inputs in the form that kernels read.
#pragma once

#include <algorithm>

#include "cpu/cpu_backend.h"

namespace delta {

// Rows of n values, float32 or rounded to integers.
struct Inputs {
    const uint8_t* data;
    size_t stride;  // bytes from one row to the next
    CpuInput kind;

    const void* row(int64_t i) const { return data + static_cast<size_t>(i) * stride; }
};

// Bytes of one row of n rounded values; 0 if they are not rounded, but used where they are.
size_t rounded_row_bytes(CpuInput kind, int64_t n);

// Rows x + i * x_stride (in floats) of n values. `buffer`: n_rows * rounded_row_bytes().
Inputs round_inputs(CpuBackend& self, CpuInput kind, const float* x, int64_t n_rows, int64_t x_stride, int64_t n, uint8_t* buffer);

constexpr int64_t kDecodedRows = 8;

// Floats that multiply_rows needs for weights of a type that has no kernel.
inline size_t decoded_floats(const Weight& w) {
    return cpu_type(*w.type) == kCpuTypes ? static_cast<size_t>(kDecodedRows * w.cols) : 0;
}

// out[j][i] = <row first + i of matrix mat, x_j> for n_w weight rows and any number n_x of inputs and outputs, given by index:
// input(j) is a row of `x`, output(j) the address of the results. `decoded`: decoded_floats(w), of the thread.
template <class InputOf, class OutputOf>
void multiply_rows(const CpuKernels& k, const Weight& w, int64_t mat, int64_t first, int64_t n_w, const Inputs& x, int64_t n_x,
                   const InputOf& input, const OutputOf& output, float* decoded) {
    constexpr int64_t kAtOnce = 256;
    const void* inputs[kAtOnce];
    float* outputs[kAtOnce];
    const CpuType type = cpu_type(*w.type);
    for (int64_t j = 0; j < n_x; j += kAtOnce) {
        const auto n = static_cast<int32_t>(std::min(kAtOnce, n_x - j));
        for (int32_t i = 0; i < n; ++i) {
            inputs[i] = x.row(input(j + i));
            outputs[i] = output(j + i);
        }
        if (type != kCpuTypes) {
            (x.kind == kInputI8 ? k.dot_i8 : k.dot)[type](w.row(mat, first), w.row_bytes(), static_cast<int32_t>(n_w), inputs, n, w.cols, outputs);
            continue;
        }
        for (int64_t row = 0; row < n_w; row += kDecodedRows) {
            const int64_t rows = std::min(kDecodedRows, n_w - row);
            w.type->to_float(w.row(mat, first + row), decoded, rows * w.cols);
            k.dot[kF32](reinterpret_cast<const uint8_t*>(decoded), static_cast<size_t>(w.cols) * sizeof(float), static_cast<int32_t>(rows),
                        inputs, n, w.cols, outputs);
            for (int32_t i = 0; i < n; ++i) {
                outputs[i] += rows;
            }
        }
    }
}

}  // namespace delta
