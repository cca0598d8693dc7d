/* Test-only interface, exported by libdeltallama_test, which is made of the same objects as libdeltallama. Not installed, no
 * promise of stability. Plain C between the marks, read by tests/native.py. */
#ifndef DELTALLAMA_TEST_H
#define DELTALLAMA_TEST_H

#include "deltallama.h"

#ifdef __cplusplus
extern "C" {
#endif
#ifdef __GNUC__
#pragma GCC visibility push(default)
#endif

/* cdef-begin */
/* -- one op on one device (csrc/api/test_ops.cpp) ------------------------------------------------------------------------- */
typedef struct delta_test_weight {
    const char *name;  /* null: no such weight */
    uint32_t type;
    int64_t mats, rows, cols;
    const void *data;
} delta_test_weight;

typedef struct delta_test_case {
    uint32_t size;
    const char *device;
    uint32_t activations;
    uint32_t n_threads;
    const char *op;            /* a name of graph/ops.def */
    double params[8];          /* in the order of the op's parameter struct */
    delta_test_weight weights[3];
    const double *inputs[5];   /* row-major, values that float32 holds; null: no such input */
    int32_t input_cols[5];
    int32_t n_rows;
    const int32_t *tokens;     /* [n_rows]; null: zeros */
    const int32_t *output_rows;
    int32_t n_output_rows;
    int32_t n_head, head_dim, conv_rows;         /* shape of the recurrent state, one KDA layer */
    int32_t latent_width, n_ctx;                 /* shape of the latent cache, one MLA layer */
    uint32_t cache_type;
    const int32_t *seqs;       /* [n_seqs][4]: slot, first row, rows, position */
    int32_t n_seqs, n_slots;
    double *recurrent;         /* [n_slots] recurrent parts, read and written */
    void *latent;              /* [n_slots] latent parts, read and written */
    double *out;               /* [rows, out_cols] */
    int32_t out_cols;          /* expected; another shape is DELTA_ARG. 0: the op has no output */
    const float *pixels;       /* pixels: [n_rows, out_cols] */
    int32_t image[3];          /* ops of a vision tower: frames, rows and columns of the grid; n_rows patches in all */
    const float *features;     /* embed: rows that tokens -1, -2, ... stand for */
} delta_test_case;

/* Records the op, gives it the inputs and the state in the device's value type, runs it in an arena filled with NaN with one spare row behind every matrix, and fails with DELTA_DEVICE if the op
 * wrote into a spare row or changed an input. */
delta_status delta_test_op(const delta_test_case *test);

/* -- a whole model, seen op by op ----------------------------------------------------------------------------------------- */
typedef void (*delta_test_observer)(const char *op, const char *name, int32_t layer, const double *data, int32_t rows,
                                    int32_t cols, void *user);
/* Calls `fn` after every op of this model from now on; null stops it. */
delta_status delta_test_observe(delta_model *model, delta_test_observer fn, void *user);

/* -- kernels of one instruction set (csrc/cpu/cpu_test.cpp) ---------------------------------------------------------------- */
typedef struct delta_test_kernel_call {
    uint32_t size;
    const char *isa;           /* a word of delta_test_isas() */
    const char *kernel;        /* a word of delta_test_kernels() */
    uint32_t type;             /* dot, widen: type id of the weights */
    uint32_t input;            /* dot, quantize: 0 float32, 1 int16, 2 int8 */
    const void *inputs[5];
    void *outputs[4];
    int64_t sizes[5];          /* as the kernel's case in cpu_test.cpp lists them */
    float params[4];
} delta_test_kernel_call;
/* Kernel tables that can run here: the instruction sets of this processor, and the portable kernels at every width. Static. */
const char *delta_test_isas(void);
/* All entries of a table. Static. */
const char *delta_test_kernels(void);
/* Calls one entry; DELTA_UNSUPPORTED if the table has no such entry. */
delta_status delta_test_kernel(const delta_test_kernel_call *call);

/* -- the GGUF parser alone (csrc/api/test_gguf.cpp) ----------------------------------------------------------------------- */
typedef struct delta_test_gguf_info {
    uint32_t size;
    uint32_t n_files;
    uint64_t n_values;
    uint64_t n_tensors;
    uint64_t n_bytes;          /* of tensor data */
    uint64_t values_checksum;  /* XXH64 of each key and its text */
    uint64_t data_checksum;    /* XXH64 of each tensor's name and bytes */
} delta_test_gguf_info;
/* Opens a file or a split set and reads all of it. */
delta_status delta_test_gguf(const char *path, delta_test_gguf_info *info);
/* Parses the bytes of one file from memory of exactly that size and reads all it promises. */
delta_status delta_test_gguf_bytes(const void *data, size_t n_bytes, delta_test_gguf_info *info);
/* The text of one value. */
delta_status delta_test_gguf_text(const char *path, const char *key, char *buffer, size_t capacity);
/* XXH64. */
uint64_t delta_test_checksum(const void *data, size_t n_bytes);
/* cdef-end */

#ifdef __GNUC__
#pragma GCC visibility pop
#endif
#ifdef __cplusplus
}
#endif
#endif
