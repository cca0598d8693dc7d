"""Names and numbers of GGUF files of the architectures `kimi-linear` and `kimi-k3`, and of Kimi-K3's vision part.

Types, block sizes and file-type numbers come from the PyPI package `gguf`; this file adds the keys and tensor names of
the two architectures (that package does not know `kimi-k3`). Keys and tensor names are those of existing files, so
files are interchangeable. A text file has no key beyond theirs: the epsilon of the two LoRA norms and of the L2 norm
(1e-6) is a constant of the published model code, not a hyperparameter of the checkpoint, so the engine holds it. The
known keys of a vision file cannot say which epsilons and activations its tower has, so there `deltallama.vision.` is
added (docs/vision.md).
"""

from __future__ import annotations

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, LlamaFileType, TokenType

__all__ = [
    "ALIGNMENT",
    "GGML_QUANT_SIZES",
    "MAX_DIMS",
    "MAX_TENSOR_NAME",
    "QUANTIZATION_VERSION",
    "SCALAR_FORMATS",
    "SPLIT_KEYS",
    "SPLIT_NAME",
    "GGMLQuantizationType",
    "GGUFValueType",
    "LlamaFileType",
    "TokenType",
    "type_size",
]

MAGIC = b"GGUF"
VERSION = 3
READABLE_VERSIONS = (2, 3)
ALIGNMENT = 32  # bytes; what a file without general.alignment uses
MAX_TENSOR_NAME = 63  # bytes; loaders hold a name in 64 with its terminator
MAX_DIMS = 4
QUANTIZATION_VERSION = 2

# struct format of each scalar value type, little-endian.
SCALAR_FORMATS: dict[GGUFValueType, str] = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}

ARCH_KIMI_LINEAR = "kimi-linear"
ARCH_KIMI_K3 = "kimi-k3"
ARCH_CLIP = "clip"  # every vision part has it; the projector's type says whose it is

TYPE_MODEL = "model"  # general.type
TYPE_MMPROJ = "mmproj"

# --- keys -----------------------------------------------------------------------------------------------------------
KEY_ARCHITECTURE = "general.architecture"
KEY_NAME = "general.name"
KEY_TYPE = "general.type"
KEY_FILE_TYPE = "general.file_type"
KEY_ALIGNMENT = "general.alignment"
KEY_QUANTIZATION_VERSION = "general.quantization_version"

# Below: without the architecture prefix ("kimi-k3." and so on).
KEY_BLOCK_COUNT = "block_count"
KEY_CONTEXT_LENGTH = "context_length"
KEY_EMBEDDING_LENGTH = "embedding_length"
KEY_FEED_FORWARD_LENGTH = "feed_forward_length"
KEY_HEAD_COUNT = "attention.head_count"
KEY_HEAD_COUNT_KV = "attention.head_count_kv"  # one per layer: 0 is a KDA layer, 1 an MLA layer
KEY_ROPE_FREQ_BASE = "rope.freq_base"
KEY_RMS_EPS = "attention.layer_norm_rms_epsilon"
KEY_EXPERT_COUNT = "expert_count"
KEY_EXPERT_USED_COUNT = "expert_used_count"
KEY_EXPERT_GROUP_USED_COUNT = "expert_group_used_count"
KEY_EXPERT_GATING_FUNC = "expert_gating_func"
KEY_KEY_LENGTH = "attention.key_length"
KEY_VALUE_LENGTH = "attention.value_length"
KEY_VOCAB_SIZE = "vocab_size"
KEY_CONV_KERNEL = "ssm.conv_kernel"
KEY_KDA_HEAD_DIM = "kda.head_dim"
KEY_KDA_GATE_LOWER_BOUND = "kda.gate_lower_bound"  # absent: softplus gate
KEY_Q_LORA_RANK = "attention.q_lora_rank"
KEY_KV_LORA_RANK = "attention.kv_lora_rank"
KEY_ROPE_DIMENSION_COUNT = "rope.dimension_count"
KEY_KEY_LENGTH_MLA = "attention.key_length_mla"
KEY_VALUE_LENGTH_MLA = "attention.value_length_mla"
KEY_EXPERT_FEED_FORWARD_LENGTH = "expert_feed_forward_length"
KEY_EXPERT_SHARED_COUNT = "expert_shared_count"
KEY_LEADING_DENSE_BLOCK_COUNT = "leading_dense_block_count"
KEY_EXPERT_WEIGHTS_SCALE = "expert_weights_scale"
KEY_EXPERT_WEIGHTS_NORM = "expert_weights_norm"
KEY_EXPERT_LATENT_LENGTH = "expert_latent_length"
KEY_SITU_BETA = "activation.situ_beta"
KEY_SITU_LINEAR_BETA = "activation.situ_linear_beta"
KEY_ATTN_RES_BLOCK_SIZE = "attn_res.block_size"

# Of a vision part, without "clip.".
KEY_HAS_VISION_ENCODER = "has_vision_encoder"
KEY_PROJECTOR_TYPE = "projector_type"
KEY_USE_GELU = "use_gelu"
KEY_VISION_PROJECTION_DIM = "vision.projection_dim"
KEY_VISION_IMAGE_SIZE = "vision.image_size"  # of the learned positions, in pixels
KEY_VISION_PATCH_SIZE = "vision.patch_size"
KEY_VISION_EMBEDDING_LENGTH = "vision.embedding_length"
KEY_VISION_FEED_FORWARD_LENGTH = "vision.feed_forward_length"
KEY_VISION_BLOCK_COUNT = "vision.block_count"
KEY_VISION_HEAD_COUNT = "vision.attention.head_count"
KEY_VISION_HEAD_DIM = "vision.attention.head_dim"
KEY_VISION_NORM_EPS = "vision.attention.layer_norm_epsilon"
KEY_VISION_IMAGE_MEAN = "vision.image_mean"
KEY_VISION_IMAGE_STD = "vision.image_std"
KEY_VISION_SCALE_FACTOR = "vision.projector.scale_factor"
KEY_VISION_MIN_PIXELS = "vision.image_min_pixels"
KEY_VISION_MAX_PIXELS = "vision.image_max_pixels"
PROJECTOR_KIMI_K3 = "kimik3"

# What the keys above cannot hold; whole names.
KEY_TOWER_NORM_EPS = "deltallama.vision.tower_norm_epsilon"
KEY_PROJECTOR_NORM_EPS = "deltallama.vision.projector_norm_epsilon"
KEY_FFN_ACTIVATION = "deltallama.vision.ffn_activation"
KEY_PROJECTOR_ACTIVATION = "deltallama.vision.projector_activation"
KEY_VISION_ROPE_FREQ_BASE = "deltallama.vision.rope_freq_base"
KEY_PATCH_LIMIT = "deltallama.vision.patch_limit"
KEY_PATCH_LIMIT_ON_ONE_SIDE = "deltallama.vision.patch_limit_on_one_side"
KEY_MAX_FRAMES = "deltallama.vision.max_frames"

KEY_TOKENIZER_MODEL = "tokenizer.ggml.model"
KEY_TOKENIZER_PRE = "tokenizer.ggml.pre"
KEY_TOKENS = "tokenizer.ggml.tokens"
KEY_TOKEN_TYPE = "tokenizer.ggml.token_type"
KEY_MERGES = "tokenizer.ggml.merges"
KEY_BOS = "tokenizer.ggml.bos_token_id"
KEY_EOS = "tokenizer.ggml.eos_token_id"
KEY_PADDING = "tokenizer.ggml.padding_token_id"
KEY_CHAT_TEMPLATE = "tokenizer.chat_template"
KEY_CHAT_TEMPLATES = "tokenizer.chat_templates"

KEY_SPLIT_NO = "split.no"
KEY_SPLIT_COUNT = "split.count"
KEY_SPLIT_TENSORS_COUNT = "split.tensors.count"
SPLIT_KEYS = (KEY_SPLIT_NO, KEY_SPLIT_COUNT, KEY_SPLIT_TENSORS_COUNT)
SPLIT_NAME = "{stem}-{number:05d}-of-{count:05d}.gguf"  # number counts from 1

EXPERT_GATING_SIGMOID = 2

# --- tensors --------------------------------------------------------------------------------------------------------
TOKEN_EMBD = "token_embd.weight"
OUTPUT = "output.weight"
OUTPUT_NORM = "output_norm.weight"
OUTPUT_RES_SCORE = "output_res_score.weight"
BLOCK = "blk.{layer}."  # prefix of every name below

ATTN_NORM = "attn_norm.weight"
ATTN_RES_SCORE = "attn_res_score.weight"
ATTN_Q = "attn_q.weight"
ATTN_K = "attn_k.weight"
ATTN_V = "attn_v.weight"
ATTN_OUTPUT = "attn_output.weight"
ATTN_GATE = "attn_gate.weight"
ATTN_Q_A = "attn_q_a.weight"
ATTN_Q_A_NORM = "attn_q_a_norm.weight"
ATTN_Q_B = "attn_q_b.weight"
ATTN_KV_A_MQA = "attn_kv_a_mqa.weight"
ATTN_KV_A_NORM = "attn_kv_a_norm.weight"
ATTN_K_B = "attn_k_b.weight"
ATTN_V_B = "attn_v_b.weight"
SSM_CONV1D_Q = "ssm_conv1d_q.weight"
SSM_CONV1D_K = "ssm_conv1d_k.weight"
SSM_CONV1D_V = "ssm_conv1d_v.weight"
SSM_F_A = "ssm_f_a.weight"
SSM_F_B = "ssm_f_b.weight"
SSM_BETA = "ssm_beta.weight"
SSM_A = "ssm_a"
SSM_DT = "ssm_dt.bias"
SSM_NORM = "ssm_norm.weight"
SSM_G_A = "ssm_g_a.weight"
SSM_G_B = "ssm_g_b.weight"
SSM_G = "ssm_g.weight"
FFN_NORM = "ffn_norm.weight"
FFN_RES_SCORE = "ffn_res_score.weight"
FFN_GATE = "ffn_gate.weight"
FFN_UP = "ffn_up.weight"
FFN_DOWN = "ffn_down.weight"
FFN_GATE_INP = "ffn_gate_inp.weight"
EXP_PROBS_B = "exp_probs_b.bias"
FFN_GATE_EXPS = "ffn_gate_exps.weight"
FFN_UP_EXPS = "ffn_up_exps.weight"
FFN_DOWN_EXPS = "ffn_down_exps.weight"
FFN_GATE_SHEXP = "ffn_gate_shexp.weight"
FFN_UP_SHEXP = "ffn_up_shexp.weight"
FFN_DOWN_SHEXP = "ffn_down_shexp.weight"
FFN_ROUTED_DOWN = "ffn_routed_down.weight"
FFN_ROUTED_UP = "ffn_routed_up.weight"
FFN_ROUTED_NORM = "ffn_routed_norm.weight"

# Of a vision part.
V_PATCH_EMBD = "v.patch_embd.weight"
V_POSITION_EMBD = "v.position_embd.weight"
V_POST_LN = "v.post_ln.weight"
V_BLOCK = "v.blk.{layer}."  # prefix of the next six
V_LN1 = "ln1.weight"
V_LN2 = "ln2.weight"
V_ATTN_QKV = "attn_qkv.weight"
V_ATTN_OUT = "attn_out.weight"
V_FFN_UP = "ffn_up.weight"
V_FFN_DOWN = "ffn_down.weight"
MM_1 = "mm.1.weight"
MM_2 = "mm.2.weight"
MM_POST_NORM = "mm.post_norm.weight"

# Two-dimensional and larger tensors that stay F32 whatever the output type: rounding a router or a convolution tap
# costs far more than the bytes it saves.
ALWAYS_F32 = frozenset({FFN_GATE_INP, SSM_CONV1D_Q, SSM_CONV1D_K, SSM_CONV1D_V})


def type_size(type_: GGMLQuantizationType, n_elements: int) -> int:
    """Bytes of `n_elements` values of a type; `n_elements` is a multiple of its block size."""
    block, size = GGML_QUANT_SIZES[type_]
    return n_elements // block * size
