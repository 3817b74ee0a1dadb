"""Landlock (linux/landlock.h, Linux 5.13 and newer): this thread and its children write below some folders only."""

from __future__ import annotations

import ctypes
import os
import struct

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_VERSION = 1
_PATH_BENEATH = 1
_WRITE_FILE = 1 << 1
_WRITES = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))  # remove and make anything
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_SCOPE_ABSTRACT_UNIX, _SCOPE_SIGNAL = 1, 2


def version() -> int:
    """Of the kernel's Landlock; 0 where there is none."""
    return max(0, int(ctypes.CDLL(None, use_errno=True).syscall(_CREATE, None, ctypes.c_size_t(0), _VERSION)))


def restrict(folder: str) -> None:
    """Allow writes below `folder` and to /dev/null alone. Needs no_new_privs; OSError where it cannot."""
    abi = version()
    if abi == 0:
        raise OSError("no Landlock in this kernel")
    handled = _WRITES | (_REFER if abi >= 2 else 0) | (_TRUNCATE if abi >= 3 else 0)
    attributes = struct.pack("QQQ", handled, 0, _SCOPE_ABSTRACT_UNIX | _SCOPE_SIGNAL if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = _call(_CREATE, ctypes.c_char_p(attributes), ctypes.c_size_t(size), 0)
    try:
        _allow(ruleset, folder, handled)
        _allow(ruleset, "/dev/null", handled & (_WRITE_FILE | _TRUNCATE))
        _call(_RESTRICT, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        _call(_ADD, ruleset, _PATH_BENEATH, ctypes.c_char_p(struct.pack("=Qi", access, fd)), 0)
    finally:
        os.close(fd)


def _call(number: int, *args: object) -> int:
    found = int(ctypes.CDLL(None, use_errno=True).syscall(number, *args))
    if found < 0:
        raise OSError(ctypes.get_errno(), "landlock")
    return found
