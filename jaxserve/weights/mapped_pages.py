"""Letting go of a mapped file's pages: once copied, they need not count as this process's memory."""

from __future__ import annotations

import mmap

import numpy as np


def release_pages(data: mmap.mmap, view: np.ndarray) -> bool:
    """Whether ``view`` lies in ``data``, a file mapped for reading; then the pages that it spans are let go.

    They stay in the system's page cache for as long as there is room, and are read again when they are touched.
    """
    address = np.frombuffer(data, np.uint8).ctypes.data
    begin, end = (bound - address for bound in np.lib.array_utils.byte_bounds(view))
    if not 0 <= begin <= end <= len(data):
        return False
    if hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
        begin -= begin % mmap.PAGESIZE
        data.madvise(mmap.MADV_DONTNEED, begin, end - begin)
    return True
