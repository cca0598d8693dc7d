"""Kimi-K3's eyes: the MoonViT-3d tower and its projector to a file of their own, `mmproj-….gguf`.

Keys and tensor names are those that other programs use for this projector (`kimik3`). What they have no key for, two
more epsilons, the activations and the limits of an image, goes under `deltallama.vision.` (docs/vision.md).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gguf_ext import Plan, PlannedTensor
from gguf_ext import constants as c
from gguf_ext.constants import GGMLQuantizationType, GGUFValueType, LlamaFileType

from .base import Converter, Row, register
from .checkpoint import Checkpoint
from .config import PREPROCESSOR, Config
from .errors import ConversionError
from .folds import AxisMajorRope, Copy
from .types import OUTTYPES, Override, Types

log = logging.getLogger("conversion")

# Constants of the published code, no fields of a configuration. The tower's norms are built without an epsilon and get
# that of float32 numbers.
TOWER_NORM_EPS = float(np.finfo(np.float32).eps)
ROPE_FREQ_BASE = 10000.0
# The only ones a configuration may have; it calls them gelu_pytorch_tanh and gelu.
FFN_ACTIVATION, PROJECTOR_ACTIVATION = "gelu_tanh", "gelu_erf"
_MIN_PATCHES = 8  # of an image that other programs do not enlarge; ours has no use for it

_VISION = "vision_config."
_MEDIA = "media_proc_cfg."
_TIME_WEIGHT = "vision_tower.patch_embed.pos_emb.time_weight"

_MODEL = (
    Row("vision_tower.patch_embed.proj.weight", ("hidden", "rgb", "patch", "patch"), Copy(c.V_PATCH_EMBD)),
    Row("vision_tower.patch_embed.pos_emb.weight", ("grid_rows", "grid_columns", "hidden"), Copy(c.V_POSITION_EMBD)),
    Row("vision_tower.encoder.final_layernorm.weight", ("hidden",), Copy(c.V_POST_LN)),
    Row("mm_projector.proj.0.weight", ("merged", "merged"), Copy(c.MM_1)),
    Row("mm_projector.proj.2.weight", ("text", "merged"), Copy(c.MM_2)),
    Row("mm_projector.post_norm.weight", ("text",), Copy(c.MM_POST_NORM)),
)
_EVERY_LAYER = (
    Row("norm0.weight", ("hidden",), Copy(c.V_LN1)),
    Row("norm1.weight", ("hidden",), Copy(c.V_LN2)),
    Row("wo.weight", ("hidden", "attention"), Copy(c.V_ATTN_OUT)),
    Row("mlp.fc0.weight", ("mlp", "hidden"), Copy(c.V_FFN_UP)),
    Row("mlp.fc1.weight", ("hidden", "mlp"), Copy(c.V_FFN_DOWN)),
)


@dataclass
class _VisionTypes(Types):
    """The table of positions stays F32. The patches' kernel has rows of one patch's width, too short for blocks, and
    is F32 or F16 as other programs expect it."""

    def of(self, prefix: str, name: str, ne: tuple[int, ...]) -> GGMLQuantizationType:
        if name == c.V_POSITION_EMBD:
            return GGMLQuantizationType.F32
        if name == c.V_PATCH_EMBD:
            is_half = self.outtype is OUTTYPES["f16"]
            return GGMLQuantizationType.F16 if is_half else GGMLQuantizationType.F32
        return super().of(prefix, name, ne)

    def _wanted(self, prefix: str, name: str) -> GGMLQuantizationType:
        asked = self.asked_for(prefix + name)
        return self.outtype.matrices if asked is None else asked


@register("KimiK3ForConditionalGeneration")
class MoonVit(Converter):
    """The vision part of `KimiK3ForConditionalGeneration` to `clip` with the projector `kimik3`."""

    architecture = c.ARCH_CLIP
    kind = c.TYPE_MMPROJ
    outtypes = ("f32", "f16", "bf16", "q8_0")
    wanted = ("vision_tower.", "mm_projector.")
    renames = ()
    layers_field = _VISION + "vt_num_hidden_layers"
    layer_prefix = "vision_tower.encoder.blocks."
    block = c.V_BLOCK
    # No biases: a checkpoint that has them is another tower, and the field that should say so is named.
    deciding_fields = {
        "patch_embed.proj.bias": _VISION + "patch_embed_proj_bias",
        "wqkv.bias": _VISION + "attn_bias",
        "wo.bias": _VISION + "attn_bias",
        "fc0.bias": _VISION + "linear_bias",
        "fc1.bias": _VISION + "linear_bias",
    }

    def __init__(self, config: Config) -> None:
        if not isinstance(config.get("vision_config"), dict):
            raise ConversionError(
                f"{config.path}: vision_config is {config.shown('vision_config')}: this checkpoint has no vision part"
            )
        super().__init__(config)

    def read_quantization(self) -> None:
        """Schemes are about the text model; vision tensors are floats, which is checked of each."""

    def read_config(self) -> None:
        config = self.config
        for field, value in (
            ("pos_emb_type", "divided_fixed"),
            ("pos_emb_interpolation_mode", "bilinear"),
            ("norm_type", "rmsnorm"),
            ("mlp_type", "mlp2"),
            ("activation_func", "gelu_pytorch_tanh"),
            ("merge_type", "sd2_tpool"),
            ("mm_projector_type", "patchmergerv2"),
            ("projector_hidden_act", "gelu"),
            ("patch_embed_proj_bias", False),
            ("attn_bias", False),
            ("linear_bias", False),
        ):
            config.must_be(_VISION + field, value)
        self.patch = self._size("patch", "patch_size")
        self.hidden = self._size("hidden", "vt_hidden_size")
        self.mlp = self._size("mlp", "vt_intermediate_size")
        self.attention = self._size("attention", "qkv_hidden_size")
        self.grid_rows = self._size("grid_rows", "init_pos_emb_height")
        self._size("grid_columns", "init_pos_emb_width")
        self.text = self._size("text", "text_hidden_size")
        self.width("rgb", 3, "3")
        self.width("qkv", 3 * self.attention, f"3 * {_VISION}qkv_hidden_size")
        self.max_frames = config.integer(_VISION + "init_pos_emb_time")
        self.projector_eps = config.positive(_VISION + "projector_ln_eps")
        self._read_heads()
        self._read_merge()
        self._read_pairing()
        with config.checks:
            self._read_preprocessor(Config(config.path.with_name(PREPROCESSOR), config.checks))

    def _size(self, name: str, field: str) -> int:
        return self.width(name, self.config.integer(_VISION + field), _VISION + field)

    def _read_heads(self) -> None:
        self.heads = self.config.integer(_VISION + "vt_num_attention_heads")
        if self.attention % (4 * self.heads):
            self.config.refuse(
                _VISION + "qkv_hidden_size",
                f"{self.heads} heads (vt_num_attention_heads) of whole groups of four: two directions turn a pair each",
            )
            self.config.has_stand_ins = True  # such rows cannot be reordered
        if self.hidden % 2:
            self.config.refuse(_VISION + "vt_hidden_size", "an even number: half of it are sines of the time")

    def _read_merge(self) -> None:
        self.config.must_be(_VISION + "merge_kernel_size", [2, 2])
        self.merge = 2
        self.width("merged", self.merge**2 * self.hidden, f"4 * {_VISION}vt_hidden_size")
        field = _VISION + "mm_hidden_size"
        if self.config.integer(field) != self.hidden:
            self.config.refuse(field, f"vt_hidden_size, {self.hidden}: the projector takes what the tower gives")

    def _read_pairing(self) -> None:
        """The projector's rows stand in place of the text model's embeddings."""
        text = self.config.integer("hidden_size")
        if text != self.text:
            self.config.refuse(
                _VISION + "text_hidden_size", f"hidden_size of the text model, {text}: the projector is another model's"
            )

    def _read_preprocessor(self, media: Config) -> None:
        """Check that pictures are prepared the one way there is (`deltallama/images.py`); take the numbers."""
        media.must_be(_MEDIA + "patch_size", self.patch)
        media.must_be(_MEDIA + "merge_kernel_size", self.merge)
        media.must_be_absent(_MEDIA + "fixed_output_tokens", "images of one size only are not supported")
        for field, value in (
            ("pattern", "chessboard"),
            ("chessboard_square_size", 8),
            ("chessboard_square_on_top_left", True),
            ("chessboard_white_value", 255),
            ("chessboard_gray_value", 180),
        ):
            media.must_be(f"{_MEDIA}transparent_bg_config.{field}", value)
        media.must_be(_MEDIA + "transparent_bg_fill_stage", "after_resize")
        self.mean = _colours(media, "image_mean")
        self.std = _colours(media, "image_std", above=0.0)
        self.patch_limit = media.integer(_MEDIA + "in_patch_limit")
        self.side_limit = media.integer(_MEDIA + "patch_limit_on_one_side")
        most = (2**32 - 1) // self.patch**2
        if self.patch_limit > most:
            media.refuse(_MEDIA + "in_patch_limit", f"at most {most}: a file counts pixels in 32 bits")
            self.patch_limit = most
        self.config.has_stand_ins |= media.has_stand_ins

    def model_rows(self) -> Iterable[Row]:
        return _MODEL

    def layer_rows(self, layer: int) -> Iterable[Row]:
        return (Row("wqkv.weight", ("qkv", "hidden"), AxisMajorRope(c.V_ATTN_QKV, self.heads)), *_EVERY_LAYER)

    def types(self, outtype: str, overrides: Sequence[Override]) -> Types:
        return _VisionTypes(OUTTYPES[outtype], overrides, self.n_layers)

    def plan_tensors(self, checkpoint: Checkpoint, types: Types) -> list[PlannedTensor]:
        if not any(name.startswith(self.wanted) for name in checkpoint.tensors):
            raise ConversionError(
                f"{checkpoint.folder}: no tensor begins with {' or '.join(self.wanted)}: this checkpoint has no vision "
                "part, though config.json has a vision_config"
            )
        if _TIME_WEIGHT in checkpoint.tensors:
            log.warning("%s is left out: the code computes it", _TIME_WEIGHT)
        return super().plan_tensors(checkpoint, types)

    def add_fields(self, plan: Plan, file_type: LlamaFileType) -> None:
        u32, f32, string = GGUFValueType.UINT32, GGUFValueType.FLOAT32, GGUFValueType.STRING
        plan.add_field(c.KEY_FILE_TYPE, int(file_type), u32)
        add = self.field_adder(plan)
        add(c.KEY_HAS_VISION_ENCODER, True, GGUFValueType.BOOL)
        add(c.KEY_VISION_PROJECTION_DIM, self.text, u32)
        add(c.KEY_VISION_IMAGE_SIZE, self.grid_rows * self.patch, u32)
        add(c.KEY_VISION_PATCH_SIZE, self.patch, u32)
        add(c.KEY_VISION_EMBEDDING_LENGTH, self.hidden, u32)
        add(c.KEY_VISION_FEED_FORWARD_LENGTH, self.mlp, u32)
        add(c.KEY_VISION_BLOCK_COUNT, self.n_layers, u32)
        add(c.KEY_VISION_HEAD_COUNT, self.heads, u32)
        add(c.KEY_VISION_IMAGE_MEAN, self.mean, f32)
        add(c.KEY_VISION_IMAGE_STD, self.std, f32)
        add(c.KEY_PROJECTOR_TYPE, c.PROJECTOR_KIMI_K3, string)
        add(c.KEY_VISION_HEAD_DIM, self.attention // self.heads, u32)
        add(c.KEY_USE_GELU, True, GGUFValueType.BOOL)
        add(c.KEY_VISION_NORM_EPS, self.projector_eps, f32)
        add(c.KEY_VISION_SCALE_FACTOR, self.merge, u32)
        add(c.KEY_VISION_MIN_PIXELS, _MIN_PATCHES * self.patch**2, u32)
        add(c.KEY_VISION_MAX_PIXELS, self.patch_limit * self.patch**2, u32)
        own = plan.add_field
        own(c.KEY_TOWER_NORM_EPS, TOWER_NORM_EPS, f32)
        own(c.KEY_PROJECTOR_NORM_EPS, self.projector_eps, f32)
        own(c.KEY_FFN_ACTIVATION, FFN_ACTIVATION, string)
        own(c.KEY_PROJECTOR_ACTIVATION, PROJECTOR_ACTIVATION, string)
        own(c.KEY_VISION_ROPE_FREQ_BASE, ROPE_FREQ_BASE, f32)
        own(c.KEY_PATCH_LIMIT, self.patch_limit, u32)
        own(c.KEY_PATCH_LIMIT_ON_ONE_SIDE, self.side_limit, u32)
        own(c.KEY_MAX_FRAMES, self.max_frames, u32)


def _colours(media: Config, field: str, above: float = -math.inf) -> list[float]:
    """A required number for each of red, green and blue."""
    value = media.get(_MEDIA + field)
    with media.checks:
        if not isinstance(value, list) or len(value) != 3 or not all(_is_number(item, above) for item in value):
            raise media.wrong(_MEDIA + field, "three numbers" + (f" above {above:g}" if above > -math.inf else ""))
        return [float(item) for item in value]
    return [0.5, 0.5, 0.5]


def _is_number(value: object, above: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and above < value < math.inf
