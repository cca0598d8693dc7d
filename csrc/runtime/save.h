// A session in a file: the timeline, the state after it and the logits of its last token. All numbers are little-endian.
//
//   header    StateHeader of save.cpp: format version, what the state belongs to, sizes
//   tokens    int32 [n_tokens]
//   recurrent [recurrent_bytes], as in StateLayout
//   latents   for each MLA layer [n_tokens, latent_row_bytes]
//   logits    float32 [n_vocab], if there are any
//   checksum  XXH64 of everything before it
#pragma once

#include "runtime/session.h"

namespace delta {

// Writes a temporary file beside `path` and renames it once it is complete and on disk. Throws Error (IO, STATE after a failed step).
void save_session(Session& session, const char* path);

// Throws Error: IO, FORMAT (damaged), UNSUPPORTED (another format version, model, value type or cache type), CONTEXT_FULL. The session is as
// before, unless the file changes or becomes unreadable between its check and its use; then the session is empty.
void load_session(Session& session, const char* path);

}  // namespace delta
