// MoonViT-3d: patches of an image, positions from a learned grid, pre-norm blocks with 2-D rotation and attention over the whole image;
// squares of patches are then laid side by side and projected to the width of the text model.
#include "models/moonvit.h"

#include "base/error.h"
#include "models/keys.h"

namespace delta {
namespace {

constexpr float kTowerEps = 1.1920929e-07F;  // the reference's norms have their framework's default, 2^-23

GeluParams read_gelu(const Keys& keys, const char* name, GeluParams otherwise) {
    if (!keys.has(name)) {
        return otherwise;
    }
    const std::string_view text = keys.file().string(keys.key(name));
    if (text == "gelu_erf") {
        return {GeluParams::Erf};
    }
    if (text == "gelu_tanh") {
        return {GeluParams::Tanh};
    }
    throw Error(DELTA_UNSUPPORTED, format("%s: key %s is %s; supported: gelu_erf, gelu_tanh", keys.file().path().c_str(), keys.key(name).c_str(),
                                          quoted(text).c_str()));
}

// What each colour is normalised with; absent keys mean 0.5.
std::array<float, 3> read_colours(const Keys& keys, const char* name) {
    std::array<float, 3> values = {0.5F, 0.5F, 0.5F};
    if (!keys.has(name)) {
        return values;
    }
    const std::vector<double> found = keys.file().reals(keys.key(name));
    if (found.size() != values.size()) {
        keys.fail(name, format("has %zu entries, expected 3", found.size()));
    }
    for (size_t i = 0; i < values.size(); ++i) {
        values[i] = static_cast<float>(found[i]);
        if (!std::isfinite(values[i]) || (std::string_view(name) == "image_std" && !(values[i] > 0))) {
            keys.fail(name, format("has entry %g", found[i]));
        }
    }
    return values;
}

// The learned positions {width of the tower, columns, rows}.
GridParams read_grid(const GgufSet& file) {
    const GgufTensor* table = file.find_tensor("v.position_embd.weight");
    constexpr int64_t kMost = 1 << 14;
    if (table == nullptr) {
        throw Error(DELTA_FORMAT, format("%s: tensor v.position_embd.weight is missing", file.path().c_str()));
    }
    if (table->mats > kMost || table->rows > kMost) {
        throw Error(DELTA_FORMAT, format("%s: tensor v.position_embd.weight is a grid of %lld x %lld positions, expected at most %lld a side",
                                         file.path().c_str(), static_cast<long long>(table->mats), static_cast<long long>(table->rows),
                                         static_cast<long long>(kMost)));
    }
    return {static_cast<int32_t>(table->mats), static_cast<int32_t>(table->rows)};
}

VisionHparams read_vision_hparams(const GgufSet& file) {
    const Keys clip(file, "clip.vision");
    const Keys own(file, "deltallama.vision");
    VisionHparams h;
    h.n_layer = clip.count("block_count", 1, 4096);
    h.n_embd = clip.count("embedding_length");
    h.n_ff = clip.count("feed_forward_length");
    h.n_head = clip.count("attention.head_count", 1, 1 << 14);
    h.head_dim = clip.has("attention.head_dim") ? clip.count("attention.head_dim", 1, 1 << 14) : h.n_embd / h.n_head;
    if (h.head_dim % 4 != 0) {
        clip.fail("attention.head_dim", format("is %d; pairs for two directions need a multiple of 4", h.head_dim));
    }
    h.projection_dim = clip.count("projection_dim");
    h.patch_size = clip.count("patch_size", 1, 1 << 10);
    h.merge = clip.has("projector.scale_factor") ? clip.count("projector.scale_factor", 1, 64) : 2;
    h.grid = read_grid(file);
    h.mean = read_colours(clip, "image_mean");
    h.std = read_colours(clip, "image_std");
    h.eps = own.has("tower_norm_epsilon") ? own.positive("tower_norm_epsilon") : kTowerEps;
    h.projector_eps = own.has("projector_norm_epsilon") ? own.positive("projector_norm_epsilon") : clip.positive("attention.layer_norm_epsilon");
    h.rope_base = own.has("rope_freq_base") ? double{own.positive("rope_freq_base")} : 10000.0;
    h.ffn_gelu = read_gelu(own, "ffn_activation", {GeluParams::Tanh});
    h.projector_gelu = read_gelu(own, "projector_activation", {GeluParams::Erf});
    h.patch_limit = own.has("patch_limit") ? own.count("patch_limit") : 65536;
    h.side_limit = own.has("patch_limit_on_one_side") ? own.count("patch_limit_on_one_side", 1, 1 << 14) : 512;
    h.max_frames = own.has("max_frames") ? own.count("max_frames", 1, 1 << 10) : 4;
    return h;
}

class TowerBuilder {
   public:
    TowerBuilder(const GgufSet& file, BoundVision& vision) : h_(vision.hparams), bind_(file, "kimik3", vision), rec_(vision.graph) {}

    void build() {
        Value x = embed();
        for (int32_t i = 0; i < h_.n_layer; ++i) {
            rec_.enter_layer(i);
            x = block(i, x);
        }
        rec_.enter_layer(-1);
        rec_.finish(project(rec_.rms_norm(x, bind_.vector("v.post_ln.weight", h_.n_embd), h_.eps)));
        bind_.check_closure();
    }

   private:
    Value embed() {
        const Value pixels = rec_.pixels(h_.patch_values());
        const int64_t side = h_.patch_size;
        const Value x = rec_.linear(pixels, bind_.flattened("v.patch_embd.weight", 3 * int64_t{h_.n_embd}, side, side, h_.n_embd));
        const int64_t places = int64_t{h_.grid.height} * h_.grid.width;
        rec_.grid_position(x, bind_.flattened("v.position_embd.weight", h_.grid.height, h_.grid.width, h_.n_embd, places, Want::F32), h_.grid);
        return x;
    }

    Value block(int32_t layer, Value x) {
        const auto name = [&](const char* part) { return "v.blk." + std::to_string(layer) + "." + part + ".weight"; };
        const int64_t inner = int64_t{h_.n_head} * h_.head_dim;
        const ImageAttentionParams attention{h_.n_head, h_.head_dim, h_.rope_base};
        {
            const Recorder::Part part(rec_, "attention");
            const Value normed = rec_.rms_norm(x, bind_.vector(name("ln1"), h_.n_embd), h_.eps);
            const Value qkv = rec_.linear(normed, bind_.get(name("attn_qkv"), 1, 3 * inner, h_.n_embd));
            rec_.grid_rope(qkv, attention);
            x = rec_.add(x, rec_.linear(rec_.image_attention(qkv, attention), bind_.get(name("attn_out"), 1, h_.n_embd, inner)));
        }
        const Recorder::Part part(rec_, "dense");
        const Value normed = rec_.rms_norm(x, bind_.vector(name("ln2"), h_.n_embd), h_.eps);
        const Value up = rec_.linear(normed, bind_.get(name("ffn_up"), 1, h_.n_ff, h_.n_embd));
        rec_.gelu(up, h_.ffn_gelu);
        return rec_.add(x, rec_.linear(up, bind_.get(name("ffn_down"), 1, h_.n_embd, h_.n_ff)));
    }

    Value project(Value x) {
        const int64_t merged = int64_t{h_.merge} * h_.merge * h_.n_embd;
        const Value z = rec_.linear(rec_.merge_squares(x, h_.merge), bind_.get("mm.1.weight", 1, merged, merged));
        rec_.gelu(z, h_.projector_gelu);
        const Value y = rec_.linear(z, bind_.get("mm.2.weight", 1, h_.projection_dim, merged));
        return rec_.rms_norm(y, bind_.vector("mm.post_norm.weight", h_.projection_dim), h_.projector_eps);
    }

    VisionHparams& h_;
    Binder bind_;
    Recorder rec_;
};

}  // namespace

BoundVision build_moonvit(const GgufSet& file) {
    const std::string_view architecture = file.string("general.architecture");
    if (architecture != "clip") {
        throw Error(DELTA_UNSUPPORTED, format("%s: architecture %s is no vision tower; expected 'clip', as in an mmproj file", file.path().c_str(),
                                              quoted(architecture).c_str()));
    }
    const std::string_view projector = file.string("clip.projector_type");
    if (projector != "kimik3") {
        throw Error(DELTA_UNSUPPORTED, format("%s: clip.projector_type is %s; supported: 'kimik3'", file.path().c_str(), quoted(projector).c_str()));
    }
    BoundVision vision;
    vision.hparams = read_vision_hparams(file);
    TowerBuilder(file, vision).build();
    for (const GgufTensor& t : file.tensors()) {
        vision.n_params += static_cast<uint64_t>(t.mats) * static_cast<uint64_t>(t.rows) * static_cast<uint64_t>(t.cols);
        vision.weight_bytes += t.n_bytes;
    }
    return vision;
}

}  // namespace delta
