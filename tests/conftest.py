"""Triton kernels run interpreted, on CPU tensors. `TRITON_INTERPRET=0` leaves their tests out."""

import os

# Before anything imports Triton, whose own functions are interpreted or compiled from then on.
os.environ.setdefault("TRITON_INTERPRET", "1")
