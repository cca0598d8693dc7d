"""What can be wrong with a checkpoint: one named defect each, applied to an otherwise good one.

``DEFECTS`` maps each name to one line saying what is wrong. A defect either edits the checkpoint in memory or, where it
is about the files themselves, the folder after it was written.
"""

from . import config, files, tensors
from .registry import DEFECTS, apply_to_checkpoint, apply_to_files, defect_arch

__all__ = ["DEFECTS", "apply_to_checkpoint", "apply_to_files", "config", "defect_arch", "files", "tensors"]
