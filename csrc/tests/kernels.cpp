// Calls single kernels for a test that runs elsewhere: tests/kernels.py starts this program under an emulator, so that kernels of a
// processor that is not at hand meet the same tests. With the argument --list it prints the tables that can run and exits; otherwise it
// answers requests on standard input until that ends.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "include/deltallama_test.h"

namespace {

constexpr int kInputs = 5, kOutputs = 4;
constexpr size_t kAlign = 64;

// What a request begins with. The name of the table, the kernel's, each input and each output follow. An answer: status, then the
// length of a message and the message, or each output as it is now.
struct Request {
    uint32_t isa_bytes, kernel_bytes, type, input;
    int64_t sizes[5];
    float params[4];
    uint64_t bytes[kInputs + kOutputs];
    uint32_t misaligned[kInputs + kOutputs];  // the caller's address, modulo 64
};

void read_all(void* to, size_t n_bytes) {
    if (n_bytes > 0 && std::fread(to, 1, n_bytes, stdin) != n_bytes) {
        std::fprintf(stderr, "delta-kernels: a request ended early\n");
        std::exit(1);
    }
}

std::string read_text(size_t n_bytes) {
    std::string text(n_bytes, '\0');
    read_all(text.data(), n_bytes);
    return text;
}

template <class T>
void write(const T& value) {
    std::fwrite(&value, sizeof value, 1, stdout);
}

// An array as misaligned as the caller's.
struct Array {
    std::vector<uint8_t> memory;
    uint8_t* data = nullptr;
    size_t n_bytes = 0;

    void read(size_t n, size_t misaligned) {
        n_bytes = n;
        memory.resize(n + 2 * kAlign);
        const size_t past = reinterpret_cast<uintptr_t>(memory.data()) % kAlign;
        data = memory.data() + (kAlign - past) + misaligned % kAlign;
        read_all(data, n);
    }
};

void answer(const Request& request) {
    const std::string isa = read_text(request.isa_bytes), kernel = read_text(request.kernel_bytes);
    Array arrays[kInputs + kOutputs];
    for (int i = 0; i < kInputs + kOutputs; ++i) {
        arrays[i].read(request.bytes[i], request.misaligned[i]);
    }
    delta_test_kernel_call call = {};
    call.size = sizeof call;
    call.isa = isa.c_str();
    call.kernel = kernel.c_str();
    call.type = request.type;
    call.input = request.input;
    for (int i = 0; i < kInputs; ++i) {
        call.inputs[i] = arrays[i].data;
    }
    for (int i = 0; i < kOutputs; ++i) {
        call.outputs[i] = arrays[kInputs + i].data;
    }
    std::memcpy(call.sizes, request.sizes, sizeof call.sizes);
    std::memcpy(call.params, request.params, sizeof call.params);
    const auto status = static_cast<int32_t>(delta_test_kernel(&call));
    write(status);
    if (status != DELTA_OK) {
        const std::string message = delta_last_error();
        write(static_cast<uint32_t>(message.size()));
        std::fwrite(message.data(), 1, message.size(), stdout);
    } else {
        for (int i = 0; i < kOutputs; ++i) {
            std::fwrite(arrays[kInputs + i].data, 1, arrays[kInputs + i].n_bytes, stdout);
        }
    }
    std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
    if (argc == 2 && std::strcmp(argv[1], "--list") == 0) {
        std::printf("%s\n", delta_test_isas());
        return 0;
    }
    for (Request request; std::fread(&request, 1, sizeof request, stdin) == sizeof request;) {
        answer(request);
    }
    return 0;
}
