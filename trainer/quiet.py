"""Notices of libraries, kept out of what a run says itself."""

from __future__ import annotations

import logging
import os


def quiet_libraries() -> None:
    """Silence progress bars and notices; errors still show."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    from transformers.utils import logging as transformers_logging  # a second of imports

    transformers_logging.disable_progress_bar()
