#include "runtime/save.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "base/checksum.h"
#include "base/error.h"
#include "base/mmap.h"

namespace delta {

namespace {

static_assert(std::endian::native == std::endian::little, "the file is written as it lies in memory");

constexpr char kMagic[8] = {'D', 'E', 'L', 'T', 'A', 'S', 'E', 'S'};
constexpr uint32_t kVersion = 2;
constexpr size_t kChunk = size_t{1} << 20;

struct StateHeader {
    char magic[8];
    uint32_t version;
    uint32_t header_bytes;
    uint64_t fingerprint;                                              // of the model
    uint32_t n_kda, n_mla, conv_rows, n_head, head_dim, latent_width;  // StateLayout
    uint32_t cache_type;
    uint32_t n_vocab;
    uint64_t n_tokens;
    uint64_t recurrent_bytes;
    uint64_t latent_row_bytes;
    uint32_t has_logits;
    uint32_t value_type;  // of the recurrent part: 0 float32, 1 float64
    uint64_t n_runs;
};
static_assert(sizeof(StateHeader) == 96);

struct StoredRun {  // FeatureRun
    uint64_t begin, end, digest, index;
};

StateHeader header_of(const Model& model, size_t n_tokens, size_t n_runs, bool has_logits) {
    const StateLayout& layout = model.layout;
    StateHeader header{};
    std::memcpy(header.magic, kMagic, sizeof kMagic);
    header.version = kVersion;
    header.header_bytes = sizeof(StateHeader);
    header.fingerprint = model.fingerprint;
    header.n_kda = static_cast<uint32_t>(layout.n_kda);
    header.n_mla = static_cast<uint32_t>(layout.n_mla);
    header.conv_rows = static_cast<uint32_t>(layout.conv_rows);
    header.n_head = static_cast<uint32_t>(layout.n_head);
    header.head_dim = static_cast<uint32_t>(layout.head_dim);
    header.latent_width = static_cast<uint32_t>(layout.latent_width);
    header.cache_type = layout.cache_type->id;
    header.n_vocab = static_cast<uint32_t>(model.bound.hparams.n_vocab);
    header.n_tokens = n_tokens;
    header.n_runs = n_runs;
    header.recurrent_bytes = layout.recurrent_bytes();
    header.latent_row_bytes = layout.latent_row_bytes();
    header.has_logits = has_logits ? 1 : 0;
    header.value_type = static_cast<uint32_t>(layout.value_type);
    return header;
}

uint64_t state_bytes(const StateHeader& h) { return h.recurrent_bytes + h.n_mla * h.n_tokens * h.latent_row_bytes; }

uint64_t file_bytes(const StateHeader& h) {
    return sizeof(StateHeader) + h.n_tokens * sizeof(int32_t) + h.n_runs * sizeof(StoredRun) + state_bytes(h) + uint64_t{h.has_logits} * h.n_vocab * sizeof(float) +
           sizeof(uint64_t);
}

[[noreturn]] void io_error(const char* action, const std::string& path, int error_number) {
    throw Error(DELTA_IO, format("%s %s: %s", action, path.c_str(), system_message(error_number).c_str()));
}

// A new file beside the target; unless published it is removed.
class Output {
   public:
    explicit Output(const std::string& target) : target_(target) {
        static std::atomic<uint32_t> counter{0};
        // Replacing a device or a pipe would destroy it; a link is replaced itself, never what it points to.
        struct stat old {};
        if (::lstat(target.c_str(), &old) == 0 && !S_ISREG(old.st_mode) && !S_ISLNK(old.st_mode) &&
            !S_ISDIR(old.st_mode)) {
            throw Error(DELTA_ARG, format("%s exists and is not a regular file", target.c_str()));
        }
        do {
            path_ = format("%s.partial-%ld-%u", target.c_str(), static_cast<long>(getpid()), counter++);
            fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        } while (fd_ < 0 && errno == EEXIST);  // left behind by a killed process of the same number
        if (fd_ < 0) {
            io_error("cannot create", path_, errno);
        }
    }

    ~Output() {
        if (fd_ >= 0) {
            ::close(fd_);
        }
        if (!published_) {
            ::unlink(path_.c_str());
        }
    }
    Output(const Output&) = delete;
    Output& operator=(const Output&) = delete;

    void write(const void* data, size_t n_bytes) {
        sum_.update(data, n_bytes);
        write_plain(data, n_bytes);
    }

    void publish() {
        const uint64_t digest = sum_.digest();
        write_plain(&digest, sizeof digest);
        if (::fsync(fd_) != 0) {
            io_error("cannot write", path_, errno);
        }
        const int closed = ::close(fd_);
        fd_ = -1;
        if (closed != 0) {
            io_error("cannot write", path_, errno);
        }
        if (std::rename(path_.c_str(), target_.c_str()) != 0) {
            io_error("cannot replace", target_, errno);
        }
        published_ = true;
        sync_folder();
    }

   private:
    void write_plain(const void* data, size_t n_bytes) {
        const auto* at = static_cast<const uint8_t*>(data);
        while (n_bytes > 0) {
            const ssize_t n = ::write(fd_, at, std::min(n_bytes, size_t{1} << 30));
            if (n < 0 && errno == EINTR) {
                continue;
            }
            if (n <= 0) {
                io_error("cannot write", path_, n == 0 ? ENOSPC : errno);
            }
            at += n;
            n_bytes -= static_cast<size_t>(n);
        }
    }

    // Makes the new name survive a power cut. The file itself is complete, so a file system that cannot do this is no error.
    void sync_folder() const {
        const size_t slash = target_.rfind('/');
        const std::string folder = slash == std::string::npos ? "." : target_.substr(0, slash + 1);
        const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (fd < 0) {
            return;
        }
        ::fsync(fd);
        ::close(fd);
    }

    std::string target_, path_;
    Checksum sum_;
    int fd_ = -1;
    bool published_ = false;
};

class Input {
   public:
    explicit Input(const std::string& path) : path_(path), fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
        if (fd_ < 0) {
            io_error("cannot open", path_, errno);
        }
    }
    ~Input() { ::close(fd_); }
    Input(const Input&) = delete;
    Input& operator=(const Input&) = delete;

    const char* path() const { return path_.c_str(); }

    uint64_t size() const {
        struct stat info;
        if (::fstat(fd_, &info) != 0) {
            io_error("cannot read", path_, errno);
        }
        if (!S_ISREG(info.st_mode)) {
            throw Error(DELTA_IO, format("%s is not a regular file", path_.c_str()));
        }
        return static_cast<uint64_t>(info.st_size);
    }

    void read(void* data, size_t n_bytes, uint64_t offset) const {
        auto* at = static_cast<uint8_t*>(data);
        while (n_bytes > 0) {
            const ssize_t n = ::pread(fd_, at, std::min(n_bytes, size_t{1} << 30), static_cast<off_t>(offset));
            if (n < 0 && errno == EINTR) {
                continue;
            }
            if (n < 0) {
                io_error("cannot read", path_, errno);
            }
            if (n == 0) {
                throw Error(DELTA_FORMAT,
                            format("%s ends at byte %llu while it is read", path(), static_cast<unsigned long long>(offset)));
            }
            at += n;
            offset += static_cast<uint64_t>(n);
            n_bytes -= static_cast<size_t>(n);
        }
    }

   private:
    std::string path_;
    int fd_;
};

void expect(const Input& file, const char* what, uint64_t expected, uint64_t found, delta_status status) {
    if (expected == found) {
        return;
    }
    throw Error(status, format("%s: %s: expected %llu, found %llu", file.path(), what,
                               static_cast<unsigned long long>(expected), static_cast<unsigned long long>(found)));
}

StateHeader read_header(const Input& file, const Model& model) {
    const uint64_t size = file.size();
    StateHeader found;
    if (size < sizeof found) {
        throw Error(DELTA_FORMAT, format("%s is no saved session: it has %llu bytes, a header alone has %zu", file.path(),
                                         static_cast<unsigned long long>(size), sizeof found));
    }
    file.read(&found, sizeof found, 0);
    if (std::memcmp(found.magic, kMagic, sizeof kMagic) != 0) {
        throw Error(DELTA_FORMAT, format("%s is no saved session: its first bytes are not DELTASES", file.path()));
    }
    const StateHeader wanted = header_of(model, 0, 0, false);
    expect(file, "version of the format", wanted.version, found.version, DELTA_UNSUPPORTED);
    expect(file, "bytes of the header", wanted.header_bytes, found.header_bytes, DELTA_FORMAT);
    expect(file, "KDA layers", wanted.n_kda, found.n_kda, DELTA_UNSUPPORTED);
    expect(file, "MLA layers", wanted.n_mla, found.n_mla, DELTA_UNSUPPORTED);
    expect(file, "rows of a convolution state", wanted.conv_rows, found.conv_rows, DELTA_UNSUPPORTED);
    expect(file, "KDA heads", wanted.n_head, found.n_head, DELTA_UNSUPPORTED);
    expect(file, "width of a KDA head", wanted.head_dim, found.head_dim, DELTA_UNSUPPORTED);
    expect(file, "width of a latent row", wanted.latent_width, found.latent_width, DELTA_UNSUPPORTED);
    expect(file, "size of the vocabulary", wanted.n_vocab, found.n_vocab, DELTA_UNSUPPORTED);
    if (wanted.fingerprint != found.fingerprint) {
        throw Error(DELTA_UNSUPPORTED, format("%s was saved with another model: expected fingerprint %016llx, found %016llx",
                                              file.path(), static_cast<unsigned long long>(wanted.fingerprint),
                                              static_cast<unsigned long long>(found.fingerprint)));
    }
    if (wanted.value_type != found.value_type) {
        throw Error(DELTA_UNSUPPORTED,
                    format("%s holds a state in %s, and this model computes in %s: activations 'exact' and the device 'ref' have float64, "
                           "the other modes float32",
                           file.path(), found.value_type == 0 ? "float32" : found.value_type == 1 ? "float64" : "an unknown type",
                           value_name(model.layout.value_type)));
    }
    expect(file, "type id of the latent cache", wanted.cache_type, found.cache_type, DELTA_UNSUPPORTED);
    expect(file, "bytes of the recurrent state", wanted.recurrent_bytes, found.recurrent_bytes, DELTA_FORMAT);
    expect(file, "bytes of a latent row", wanted.latent_row_bytes, found.latent_row_bytes, DELTA_FORMAT);
    if (found.has_logits > 1) {
        expect(file, "logits flag", 1, found.has_logits, DELTA_FORMAT);
    }
    if (found.n_tokens > static_cast<uint64_t>(model.layout.n_ctx)) {
        throw Error(DELTA_CONTEXT_FULL, format("%s holds %llu tokens, a session of this model at most %d (n_ctx)", file.path(),
                                               static_cast<unsigned long long>(found.n_tokens), model.layout.n_ctx));
    }
    if (found.n_runs > found.n_tokens) {
        throw Error(DELTA_FORMAT, format("%s: %llu runs of features among %llu positions", file.path(), static_cast<unsigned long long>(found.n_runs),
                                         static_cast<unsigned long long>(found.n_tokens)));
    }
    expect(file, "bytes of the file", file_bytes(found), size, DELTA_FORMAT);
    return found;
}

// The runs of a file, if they are in order and the tokens say the same. Throws Error.
std::vector<FeatureRun> check_timeline(const char* path, std::span<const int32_t> tokens, std::span<const StoredRun> stored, uint32_t n_vocab) {
    std::vector<FeatureRun> runs;
    size_t at = 0;
    const auto check_tokens_before = [&](uint64_t end) {
        for (; at < end; ++at) {
            if (tokens[at] < 0 || static_cast<uint32_t>(tokens[at]) >= n_vocab) {
                throw Error(DELTA_FORMAT, format("%s: token %d at index %zu is not in 0..%u", path, tokens[at], at, n_vocab - 1));
            }
        }
    };
    for (const StoredRun& run : stored) {
        if (run.begin < at || run.begin >= run.end || run.end > tokens.size()) {
            throw Error(DELTA_FORMAT, format("%s: features at positions %llu to %llu of %zu, after %zu", path, static_cast<unsigned long long>(run.begin),
                                             static_cast<unsigned long long>(run.end), tokens.size(), at));
        }
        check_tokens_before(run.begin);
        for (; at < run.end; ++at) {
            if (tokens[at] != DELTA_FEATURE) {
                throw Error(DELTA_FORMAT, format("%s: token %d at index %zu, where features are", path, tokens[at], at));
            }
        }
        runs.push_back({static_cast<size_t>(run.begin), static_cast<size_t>(run.end), run.digest, run.index});
    }
    check_tokens_before(tokens.size());
    return runs;
}

// Adds [offset, offset + n_bytes) to the sums.
void add_range(const Input& file, uint64_t offset, uint64_t n_bytes, Checksum& all, Checksum& range) {
    std::vector<uint8_t> buffer(static_cast<size_t>(std::min<uint64_t>(n_bytes, kChunk)));
    while (n_bytes > 0) {
        const auto n = static_cast<size_t>(std::min<uint64_t>(n_bytes, buffer.size()));
        file.read(buffer.data(), n, offset);
        all.update(buffer.data(), n);
        range.update(buffer.data(), n);
        offset += n;
        n_bytes -= n;
    }
}

}  // namespace

void save_session(Session& session, const char* path) {
    session.require_live("saving");
    const SessionPool& pool = session.pool_;
    const StateLayout& layout = pool.model->layout;
    struct stat info;
    if (::stat(path, &info) == 0 && S_ISDIR(info.st_mode)) {
        io_error("cannot replace", path, EISDIR);
    }

    const std::vector<int32_t>& tokens = session.tokens_;
    if (tokens.empty()) {
        pool.slots.clear(session.slot_);
    }
    std::vector<StoredRun> runs;
    for (const FeatureRun& run : session.runs_) {
        runs.push_back({run.begin, run.end, run.digest, run.index});
    }
    const StateHeader header = header_of(*pool.model, tokens.size(), runs.size(), session.n_rows_ > 0);
    Output file(path);
    file.write(&header, sizeof header);
    file.write(tokens.data(), tokens.size() * sizeof(int32_t));
    file.write(runs.data(), runs.size() * sizeof(StoredRun));
    file.write(pool.slots.recurrent(session.slot_), layout.recurrent_bytes());
    for (int32_t mla = 0; mla < layout.n_mla; ++mla) {
        file.write(pool.slots.latents(session.slot_, mla), tokens.size() * layout.latent_row_bytes());
    }
    if (header.has_logits != 0) {
        file.write(pool.slots.logits(session.slot_), session.n_vocab() * sizeof(float));
    }
    file.publish();
}

void load_session(Session& session, const char* path) {
    SessionPool& pool = session.pool_;
    const StateLayout& layout = pool.model->layout;
    const Input file(path);
    const StateHeader header = read_header(file, *pool.model);

    // Everything is checked before the slot is touched. The state itself is read twice rather than held twice.
    Checksum all, state;
    all.update(&header, sizeof header);
    uint64_t offset = sizeof header;
    std::vector<int32_t> tokens(static_cast<size_t>(header.n_tokens));
    const size_t token_bytes = tokens.size() * sizeof(int32_t);
    file.read(tokens.data(), token_bytes, offset);
    all.update(tokens.data(), token_bytes);
    offset += token_bytes;
    std::vector<StoredRun> stored(static_cast<size_t>(header.n_runs));
    const size_t run_bytes = stored.size() * sizeof(StoredRun);
    file.read(stored.data(), run_bytes, offset);
    all.update(stored.data(), run_bytes);
    offset += run_bytes;
    const uint64_t state_offset = offset;
    add_range(file, offset, state_bytes(header), all, state);
    offset += state_bytes(header);
    std::vector<float> logits(size_t{header.has_logits} * header.n_vocab);
    file.read(logits.data(), logits.size() * sizeof(float), offset);
    all.update(logits.data(), logits.size() * sizeof(float));
    offset += logits.size() * sizeof(float);
    uint64_t digest;
    file.read(&digest, sizeof digest, offset);
    if (digest != all.digest()) {
        throw Error(DELTA_FORMAT,
                    format("%s is damaged: its checksum is %016llx, that of its contents %016llx", path,
                           static_cast<unsigned long long>(digest), static_cast<unsigned long long>(all.digest())));
    }
    std::vector<FeatureRun> runs = check_timeline(path, tokens, stored, header.n_vocab);
    if (!std::all_of(logits.begin(), logits.end(), [](float x) { return std::isfinite(x); })) {
        throw Error(DELTA_FORMAT, format("%s: a saved logit is NaN or infinite", path));
    }

    {
        const std::lock_guard lock(session.mutex_);
        const std::lock_guard pool_lock(pool.mutex);
        session.tokens_.clear();
        session.runs_.clear();
        session.drop_logits();
        session.last_checkpoint_ = 0;
        session.live_ = true;
        pool.checkpoints.drop_all(session.slot_);
    }
    Checksum again;
    const auto read_state = [&](uint8_t* data, size_t n_bytes, uint64_t at) {
        file.read(data, n_bytes, at);
        again.update(data, n_bytes);
        return at + n_bytes;
    };
    uint64_t at = read_state(pool.slots.recurrent(session.slot_), layout.recurrent_bytes(), state_offset);
    for (int32_t mla = 0; mla < layout.n_mla; ++mla) {
        at = read_state(pool.slots.latents(session.slot_, mla), tokens.size() * layout.latent_row_bytes(), at);
    }
    if (again.digest() != state.digest()) {
        throw Error(DELTA_IO, format("%s changed while it was read; the session is now empty", path));
    }

    {
        const std::lock_guard lock(session.mutex_);
        session.tokens_.swap(tokens);
        session.runs_.swap(runs);
        session.n_rows_ = logits.empty() ? 0 : 1;
        std::copy(logits.begin(), logits.end(), pool.slots.logits(session.slot_));
    }
    if (!session.tokens_.empty()) {
        session.keep_checkpoint();
    }
}

}  // namespace delta
