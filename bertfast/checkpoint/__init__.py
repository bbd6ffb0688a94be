"""Loading and saving checkpoints in Hugging Face's formats."""

from bertfast.checkpoint.load import load_pretrained
from bertfast.checkpoint.report import LoadReport
from bertfast.checkpoint.save import save_pretrained
from bertfast.errors import CheckpointError

__all__ = ["CheckpointError", "LoadReport", "load_pretrained", "save_pretrained"]
