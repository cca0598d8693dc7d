/* deltallama: hybrid KDA + MLA language models (Kimi-Linear, Kimi-K3) from GGUF files.
 *
 * This header is the whole public interface. Two opaque handles: a `delta_model` is a GGUF file opened on a device, with its
 * memory and a fixed number of session slots; a `delta_session` is one timeline of tokens in such a slot. Text never crosses
 * this interface, token ids do. A `delta_vision` is a vision tower beside a model: it turns pixels into rows that stand in place of
 * token embeddings.
 *
 * Status   Every fallible function returns a delta_status. Outputs come through pointers and are untouched on failure.
 *          delta_last_error() gives the calling thread's last message: what, where, expected, found.
 * Owning   Who creates, frees. Borrowed pointers live until the next call on the same handle.
 * Threads  Queries and row quantization may run on any thread at any time. Computation (sync, eval, load, save, encode) is one call at a
 *          time per model; a second one returns DELTA_BUSY. There is no hidden queue.
 * Structs  Parameter and result structs begin with `size` = sizeof(struct), set by the caller or by the *_init function; they
 *          grow only at the end.
 *
 * The region between the cdef marks is plain C without includes or conditionals: the Python binding is generated from it. */
#ifndef DELTALLAMA_H
#define DELTALLAMA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif


#ifdef __GNUC__
#pragma GCC visibility push(default)
#endif

/* cdef-begin */
#define DELTA_ABI_VERSION 3
#define DELTA_FEATURE -1 /* stands in a timeline where a feature row is: no token has this id */

typedef enum delta_status {
    DELTA_OK = 0,
    DELTA_ARG = 1,          /* an argument is out of range or null */
    DELTA_ABI = 2,          /* a struct size or version does not fit this library */
    DELTA_IO = 3,           /* the operating system refused a file operation */
    DELTA_FORMAT = 4,       /* a file is damaged or contradicts itself */
    DELTA_UNSUPPORTED = 5,  /* valid, but not something this build can run */
    DELTA_MEMORY = 6,       /* an allocation failed */
    DELTA_CONTEXT_FULL = 7, /* the timeline would exceed n_ctx */
    DELTA_DEVICE = 8,       /* the device failed */
    DELTA_NUMERIC = 9,      /* NaN or infinity where a number belongs */
    DELTA_STATE = 10,       /* not allowed in the present state of the handle */
    DELTA_BUSY = 11,        /* another computation runs on this model */
    DELTA_CANCELLED = 12    /* delta_model_cancel was called, or a progress callback asked to stop */
} delta_status;

/* How finely the model is evaluated: what is between operations and in the recurrent state, and how far products with quantized
 * weights may round their input. Routers, gates and norms are never rounded further. */
typedef enum delta_activations {
    DELTA_EXACT = 0, /* float64 throughout; a latent cache of type F32 holds float64 too */
    DELTA_FINE = 1,  /* float32; inputs of such products as 16-bit integers per block */
    DELTA_FAST = 2,  /* float32; inputs of such products as 8-bit integers per block */
    DELTA_AUTO = 3   /* as DELTA_FAST with weights of type Q2_K to Q6_K, whose own error is far larger; as DELTA_FINE with others */
} delta_activations;

/* Which rows of an evaluation keep their logits. */
typedef enum delta_logits_mode {
    DELTA_LOGITS_NONE = 0,
    DELTA_LOGITS_LAST = 1,
    DELTA_LOGITS_ALL = 2
} delta_logits_mode;

typedef struct delta_model delta_model;
typedef struct delta_session delta_session;
typedef struct delta_vision delta_vision;

typedef void (*delta_log_fn)(int level, const char *message, void *user);       /* level: 0 debug, 1 info, 2 warning */
typedef int (*delta_progress_fn)(uint64_t done, uint64_t total, void *user);    /* non-zero asks to stop */

typedef struct delta_device_info {
    uint32_t size;
    char kind[16];        /* "cpu", "ref" */
    char name[96];        /* processor name and the kernels in use */
    char isa[32];         /* "generic", "avx2" */
    uint64_t bytes_free;
    uint64_t bytes_total;
} delta_device_info;

typedef struct delta_model_params {
    uint32_t size;
    uint32_t n_ctx;             /* positions per session; 0: the smaller of the file's context length and 4096 */
    uint32_t n_batch;           /* rows per step; 0: 512 */
    uint32_t n_outputs;         /* rows per step that may ask for logits; 0: 16, at least n_sessions */
    uint32_t n_sessions;        /* slots; 0: 1 */
    uint32_t n_threads;         /* 0: physical cores */
    uint32_t activations;       /* delta_activations */
    uint32_t cache_type;        /* type id of the latent cache: 0 F32, 1 F16, 8 Q8_0, 30 BF16 */
    const char *device;         /* kind of device; null: "cpu" */
    uint64_t checkpoint_bytes;  /* budget for checkpoints of recurrent state, all sessions together; UINT64_MAX: 8 per session, at most 1 GiB */
    uint32_t checkpoint_every;  /* rows between checkpoints while a prompt is computed; 0: 512 */
    uint32_t poison;            /* 1: outputs are filled with NaN before every op (tests) */
    delta_progress_fn progress; /* called while the file is checked; may be null */
    void *progress_user;
    uint32_t n_threads_batch;   /* in steps that compute a prompt; 0: n_threads */
    uint32_t pin_threads;       /* 1: each thread but the caller's stays on a processor of its own */
    uint32_t interleave_memory; /* 1: memory is spread over all nodes of the machine */
    uint32_t reserved;          /* 0 */
} delta_model_params;

typedef struct delta_model_info {
    uint32_t size;
    char architecture[32];
    uint32_t n_layer;
    uint32_t n_layer_kda;
    uint32_t n_layer_mla;
    uint32_t n_embd;
    uint32_t n_vocab;
    uint32_t n_head;
    uint32_t n_expert;
    uint32_t n_expert_used;
    uint32_t n_ctx_train;
    uint32_t n_ctx;
    uint32_t n_batch;
    uint32_t n_outputs;
    uint32_t n_sessions;
    uint32_t n_threads;
    uint32_t activations;
    uint32_t cache_type;
    int32_t token_bos;          /* -1: the file names none */
    int32_t token_eos;
    int32_t token_pad;
    uint64_t n_params;          /* stored parameters */
    uint64_t n_params_active;   /* parameters one token touches, the embedding table left out */
    uint64_t weight_bytes;      /* bytes of all tensors */
    uint64_t weight_bytes_active; /* bytes one token reads */
    uint64_t checkpoint_size;   /* bytes of one checkpoint */
    uint32_t n_checkpoints;     /* checkpoints that fit the budget */
} delta_model_info;

/* Planned bytes on the model's device. Mapped weights are pages of the file; everything else is anonymous memory, allocated and
 * touched when the model opens. */
typedef struct delta_memory {
    uint32_t size;
    uint64_t weights_mapped;
    uint64_t weights_private;   /* repacked or converted copies */
    uint64_t state;             /* recurrent state and latent cache of all slots */
    uint64_t checkpoints;
    uint64_t arena;             /* activations of one step */
    uint64_t workspace;         /* scratch of kernels */
    uint64_t logits;            /* last logits of all sessions */
    uint64_t total_private;     /* sum of all but weights_mapped */
} delta_memory;

typedef struct delta_sync_result {
    uint32_t size;
    uint64_t n_reused;    /* leading tokens whose state was kept or restored */
    uint64_t n_computed;  /* tokens evaluated by this call */
    uint64_t n_replayed;  /* of those, tokens that had been evaluated before and had to be again */
} delta_sync_result;

typedef struct delta_token_bias {
    int32_t token;
    float bias;
} delta_token_bias;

/* Order: mask, logit bias, penalties, then temperature 0 takes the best token; otherwise temperature, top-k, top-p, min-p, draw.
 * The draw is a function of (seed, length of the timeline), so the same seed and text give the same token. */
typedef struct delta_sampling_params {
    uint32_t size;
    float temperature;          /* 0: greedy */
    int32_t top_k;              /* 0: all */
    float top_p;                /* 1: off */
    float min_p;                /* 0: off */
    float repetition_penalty;   /* 1: off */
    float presence_penalty;     /* 0: off */
    float frequency_penalty;    /* 0: off */
    int32_t penalty_last_n;     /* tokens looked back on; -1: all, 0: none */
    uint64_t seed;
    const delta_token_bias *logit_bias;
    size_t n_logit_bias;
    const uint32_t *token_mask; /* bit t allows token t, ceil(n_vocab / 32) words; null: all */
} delta_sampling_params;

typedef struct delta_top_token {
    int32_t token;
    float logit;
    float logprob;  /* natural logarithm of the softmax over the raw logits */
} delta_top_token;

typedef struct delta_batch_item {
    delta_session *session;
    const int32_t *tokens;
    size_t n_tokens;
    uint32_t logits;  /* delta_logits_mode */
} delta_batch_item;

/* A part of a timeline: token ids, or the feature rows of one image; the other pointer is null. */
typedef struct delta_piece {
    const int32_t *tokens;
    const float *features; /* [n, n_embd], needed during the call only */
    size_t n;              /* tokens or rows, at least one */
    uint64_t digest;       /* of what the features were made from: equal digests promise equal rows */
} delta_piece;

typedef struct delta_vision_params {
    uint32_t size;
    uint32_t max_patches;  /* of one image; 0: what the file's preprocessing can yield */
} delta_vision_params;

typedef struct delta_vision_info {
    uint32_t size;
    uint32_t n_layer;
    uint32_t n_embd;
    uint32_t n_ff;
    uint32_t n_head;
    uint32_t head_dim;
    uint32_t projection_dim;   /* values of a feature row: n_embd of the model */
    uint32_t patch_size;       /* pixels a side */
    uint32_t merge;            /* patches a side of the squares that become one row */
    uint32_t grid_height;      /* learned positions */
    uint32_t grid_width;
    uint32_t max_frames;
    uint32_t patch_limit;      /* of preprocessing, before it pads: patches of an image, */
    uint32_t side_limit;       /* and of a side */
    uint32_t max_patches;      /* delta_vision_encode takes no more */
    float image_mean[3];       /* of red, green, blue, between 0 and 1 */
    float image_std[3];
    uint64_t n_params;
    uint64_t weight_bytes;     /* of the mapped file */
    uint64_t bytes_now;        /* allocated: what the largest image so far needed */
    uint64_t bytes_most;       /* what an image of max_patches needs */
    uint64_t fingerprint;      /* of the file: towers of equal fingerprints make equal rows of equal pixels */
} delta_vision_info;

typedef struct delta_stats {
    uint32_t size;
    uint64_t n_computed;       /* tokens evaluated */
    uint64_t n_reused;         /* tokens that sync did not have to evaluate */
    uint64_t n_replayed;       /* tokens evaluated again after a restore */
    uint64_t n_steps;
    uint64_t n_checkpoints;    /* checkpoints held now */
    uint64_t checkpoint_bytes;
    uint64_t compute_ns;
} delta_stats;

/* What one op of the model's graph has cost since its profile was started. */
typedef struct delta_op_profile {
    uint32_t size;
    char kind[24];         /* "linear", "kda_scan", ... */
    char part[16];         /* of the model: "embed", "residual", "kda", "mla", "dense", "router", "experts", "shared", "output"; of a tower also "attention" */
    char name[64];         /* "blk.3.attn_q"; cut if longer */
    int32_t layer;         /* -1 outside the layers */
    uint64_t n_runs;       /* steps in which it had rows */
    uint64_t n_rows;       /* rows of all of them */
    uint64_t ns;
    uint64_t weight_bytes; /* weights read, once per step: of routed experts those chosen, of the embedding table the rows */
    uint64_t state_bytes;  /* states of sequences read and written: convolution inputs, S, latents */
} delta_op_profile;

/* What the products with one tensor of the file were fed with, since collecting began. A tensor is a stack of matrices: experts,
 * heads, or a single one. Borrowed until the model is closed or collecting begins anew. */
typedef struct delta_input_stats {
    uint32_t size;
    const char *name;          /* of the tensor */
    uint64_t n_mats;
    uint64_t n_cols;
    const double *sum_squares; /* [n_mats, n_cols]: of each column of the input rows */
    const uint64_t *n_rows;    /* [n_mats]: rows that each matrix was multiplied with */
} delta_input_stats;

/* -- library ------------------------------------------------------------------------------------------------------------- */
/* The interface version compiled into the library; compare it with DELTA_ABI_VERSION before anything else. */
uint32_t delta_abi_version(void);
/* Release text such as "0.1.0". Static. */
const char *delta_version(void);
/* Compiler, compiled ISAs, options. Static. */
const char *delta_build_info(void);
/* Name of a status, such as "FORMAT". Static. */
const char *delta_status_name(delta_status status);
/* The calling thread's last error message; empty when there was none. Borrowed until the thread's next failing call. */
const char *delta_last_error(void);
/* Sends log lines to `fn` (null: nowhere, the default). The callback may be called from any thread that calls the library. */
void delta_set_log(delta_log_fn fn, void *user);
/* Number of devices this build can use here. */
uint32_t delta_device_count(void);
/* Describes device `index`; `info->size` must be set. */
delta_status delta_device_info_get(uint32_t index, delta_device_info *info);

/* -- model --------------------------------------------------------------------------------------------------------------- */
/* Fills in defaults. */
void delta_model_params_init(delta_model_params *params);
/* Opens a GGUF file (the first of a split set opens all), checks every tensor and key, plans and allocates. Free with
 * delta_model_close. */
delta_status delta_model_open(const char *path, const delta_model_params *params, delta_model **model);
/* Does all of delta_model_open but the allocation and reports what it would use. Nothing to free. */
delta_status delta_model_plan(const char *path, const delta_model_params *params, delta_model_info *info, delta_memory *memory);
/* Frees the model; DELTA_STATE while it has sessions or a tower. Null is allowed. */
delta_status delta_model_close(delta_model *model);
/* Sizes and special ids. */
delta_status delta_model_info_get(const delta_model *model, delta_model_info *info);
/* Planned (= allocated) bytes. */
delta_status delta_model_memory(const delta_model *model, delta_memory *memory);
/* One metadata value as text into `buffer` of `capacity` bytes, zero-terminated; `needed` gets the size with the zero. A null
 * buffer only asks for the size. Arrays print as [a, b, ...]. */
delta_status delta_model_meta(const delta_model *model, const char *key, char *buffer, size_t capacity, size_t *needed);
/* 1 if generation ends at this token: the file's eos, or an end-of-turn token by name ([EOS], [EOT], <|im_end|>,
 * <|end_of_msg|>). */
int delta_model_is_stop(const delta_model *model, int32_t token);
/* Asks the running computation of this model to stop at the next step border; it returns DELTA_CANCELLED. Without one running it
 * does nothing. Any thread. */
void delta_model_cancel(delta_model *model);
/* Totals over all sessions since opening. */
delta_status delta_model_stats(const delta_model *model, delta_stats *stats);

/* Number of ops in the model's graph. */
size_t delta_model_op_count(const delta_model *model);
/* Starts a profile of every op from nothing (on != 0), or ends it; its figures stay. DELTA_BUSY while the model computes. */
delta_status delta_model_profile(delta_model *model, uint32_t on);
/* Figures of op `index` < delta_model_op_count, zeros before the first profile; `profile->size` must be set. DELTA_BUSY while the
 * model computes. */
delta_status delta_model_profile_get(delta_model *model, size_t index, delta_op_profile *profile);
/* Measures how fast `n_threads` threads (0: physical cores) read the model's mapped weights, of those at most 4 GiB, and do nothing
 * else: the best of 7 passes after one that brings the pages in. Takes as long as reading them eight times. */
delta_status delta_model_read_bandwidth(delta_model *model, uint32_t n_threads, double *bytes_per_second);

/* From now on computations of this model also add up, in float64, the squares of what its products are fed with. Slower: the inner
 * rows of experts are computed twice. Begins at zero, also when called again. DELTA_BUSY during a computation. */
delta_status delta_model_collect_inputs(delta_model *model);
/* Number of tensors that are collected for; 0 before collecting has begun. */
size_t delta_model_input_count(const delta_model *model);
/* The statistics of tensor `index` < delta_model_input_count; `stats->size` must be set. DELTA_BUSY during a computation. */
delta_status delta_model_input_stats(delta_model *model, size_t index, delta_input_stats *stats);

/* -- session ------------------------------------------------------------------------------------------------------------- */
/* Takes a free slot; DELTA_STATE if there is none. Free with delta_session_free. */
delta_status delta_session_create(delta_model *model, delta_session **session);
/* Returns the slot. Null is allowed; DELTA_BUSY while the session computes. */
delta_status delta_session_free(delta_session *session);
/* Makes the timeline equal to `tokens` (at least one), reusing what is valid: the common prefix with the present timeline, back to
 * the newest checkpoint in it. The logits of the last token are available afterwards. `result` may be null. Refused arguments
 * (ARG, CONTEXT_FULL) change nothing; on another failure or cancellation the timeline is a prefix of `tokens`, possibly empty. */
delta_status delta_session_sync(delta_session *session, const int32_t *tokens, size_t n_tokens, delta_progress_fn progress,
                                void *user, delta_sync_result *result);
/* The same for a timeline of tokens and feature rows. Features are compared by digest and row: another image is another prefix. */
delta_status delta_session_sync_pieces(delta_session *session, const delta_piece *pieces, size_t n_pieces, delta_progress_fn progress,
                                       void *user, delta_sync_result *result);
/* Appends tokens and computes; keeps logits as asked. On failure or cancellation the steps that were complete remain. DELTA_STATE
 * after a step has failed (NUMERIC, DEVICE), until a sync or truncate has gone back behind it. */
delta_status delta_session_eval(delta_session *session, const int32_t *tokens, size_t n_tokens, delta_logits_mode logits);
/* The same for several sessions of one model, computed together. */
delta_status delta_eval_batch(delta_model *model, const delta_batch_item *items, size_t n_items);
/* Length of the timeline. */
size_t delta_session_length(const delta_session *session);
/* Copies up to `capacity` tokens of the timeline, DELTA_FEATURE where features are; `n_tokens` gets its length. */
delta_status delta_session_tokens(const delta_session *session, int32_t *tokens, size_t capacity, size_t *n_tokens);
/* Shortens the timeline to `length` tokens: restores the newest checkpoint not beyond it and recomputes the rest. There are no
 * logits afterwards unless tokens were recomputed. DELTA_STATE, and nothing changed, if features would have to be recomputed: they are
 * not kept. */
delta_status delta_session_truncate(delta_session *session, size_t length);
/* Stores a checkpoint of the present position (ends of turns, before drafts). */
delta_status delta_session_checkpoint(delta_session *session);
/* A new session in another slot with the same timeline and state. Free with delta_session_free. */
delta_status delta_session_fork(delta_session *session, delta_session **fork);
/* Borrows the logits [n_vocab] of row `row` of the last evaluation's kept rows; -1 is the last. DELTA_STATE if it kept none. */
delta_status delta_session_logits(delta_session *session, int64_t row, const float **logits, uint32_t *n_vocab);
/* Number of rows with logits after the last evaluation. */
size_t delta_session_logits_count(const delta_session *session);
/* The `n` best tokens of row `row`, best first, ties by lower id. */
delta_status delta_session_top(delta_session *session, int64_t row, delta_top_token *top, uint32_t n);
/* Fills in defaults: temperature 0.8, top-k 40, top-p 0.95, min-p 0.05, penalties off, seed 0. */
void delta_sampling_params_init(delta_sampling_params *params);
/* Chooses a token from the last row; does not append it. */
delta_status delta_session_sample(delta_session *session, const delta_sampling_params *params, int32_t *token);
/* Writes the timeline and its state to a file: versioned, fingerprinted, checksummed, complete or absent. */
delta_status delta_session_save(delta_session *session, const char *path);
/* Reads such a file; anything that disagrees is refused and leaves the session as it was. */
delta_status delta_session_load(delta_session *session, const char *path);
/* Counters of this session. */
delta_status delta_session_stats(const delta_session *session, delta_stats *stats);

/* -- vision -------------------------------------------------------------------------------------------------------------- */
/* Fills in defaults. */
void delta_vision_params_init(delta_vision_params *params);
/* Opens the vision tower of an mmproj file for `model`, on whose device and threads it runs. DELTA_ARG if it belongs to another kind or
 * width of model. Free with delta_vision_close, before the model. */
delta_status delta_vision_open(const char *path, delta_model *model, const delta_vision_params *params, delta_vision **vision);
/* Frees the tower. Null is allowed; DELTA_BUSY while it computes. */
delta_status delta_vision_close(delta_vision *vision);
/* Sizes, limits and memory; `info->size` must be set. */
delta_status delta_vision_info_get(const delta_vision *vision, delta_vision_info *info);
/* Computes the feature rows of an image: `pixels` [frames * height * width, 3, patch_size, patch_size], normalised, patches row by row and
 * frame by frame; height and width in patches, whole squares of `merge`; features [height * width / merge^2, projection_dim], of which
 * `capacity` is the number of floats. `progress` gets ops done and in all; delta_model_cancel works too. */
delta_status delta_vision_encode(delta_vision *vision, const float *pixels, uint32_t frames, uint32_t height, uint32_t width,
                                 float *features, size_t capacity, delta_progress_fn progress, void *user);
/* Number of ops in the tower's graph. */
size_t delta_vision_op_count(const delta_vision *vision);
/* What op `index` < delta_vision_op_count has cost in the latest delta_vision_encode, zeros before the first; `profile->size` must be
 * set. DELTA_BUSY while the model computes. */
delta_status delta_vision_profile_get(delta_vision *vision, size_t index, delta_op_profile *profile);

/* -- rows ---------------------------------------------------------------------------------------------------------------- */
/* Bytes of a row of `n_cols` values of type `type`; 0 if the type is unknown or the length does not divide. */
size_t delta_row_bytes(uint32_t type, int64_t n_cols);
/* Encodes rows [n_rows, n_cols] of `src_type` (0 F32, 1 F16, 30 BF16) as `type` on `n_threads` threads (0: physical cores). The
 * quantizers that search keep the sum of importance * error^2 small; `importance` [n_cols] may be null: all columns alike. A value
 * that is no finite number or too large for `type` is DELTA_NUMERIC: the message names row, column and value, `bad_value` (may be
 * null) gets row * n_cols + column, and what `dst` then holds is not defined. */
delta_status delta_quantize_rows(uint32_t type, void *dst, uint32_t src_type, const void *src, int64_t n_rows, int64_t n_cols,
                                 const float *importance, uint32_t n_threads, int64_t *bad_value);
/* Decodes rows of `type` to float32. */
delta_status delta_dequantize_rows(uint32_t type, const void *src, float *dst, int64_t n_rows, int64_t n_cols, uint32_t n_threads);
/* Reorders MXFP4 rows as compressed-tensors packs them, codes [n_rows, n_cols / 2] and scales [n_rows, n_cols / 32], to blocks of GGUF;
 * no value changes. A scale of 255 is DELTA_NUMERIC, and `bad_block` (may be null) gets row * (n_cols / 32) + block. */
delta_status delta_repack_mxfp4(const uint8_t *packed, const uint8_t *scales, void *dst, int64_t n_rows, int64_t n_cols,
                                uint32_t n_threads, int64_t *bad_block);
/* cdef-end */

#ifdef __GNUC__
#pragma GCC visibility pop
#endif

#ifdef __cplusplus
}
#endif
#endif
